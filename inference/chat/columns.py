"""Answers of several models side by side on a terminal, one column each, while they are drawn."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from hybrid_rlhf.core.text_safety import escape_control

if TYPE_CHECKING:
    from rich.table import Table

    from hybrid_rlhf.inference.chat.session import Session


def side_by_side(session: Session, names: list[str], text: str | None) -> None:
    """Ask all of `names`, one after the other, and show what they answer in columns as it comes.

    An interrupt ends the answer under way and those not begun, and goes through after what was said is shown.
    """
    from rich.console import Console
    from rich.live import Live

    said, remarks = dict.fromkeys(names, ""), dict.fromkeys(names, "")
    console = Console(highlight=False, markup=False, emoji=False)
    # transient: what is taller than the terminal scrolls out of a live region; the whole is printed at the end
    with Live(console=console, refresh_per_second=12, transient=True) as live:
        try:
            for name in names:
                with closing(session.chat_models[name].answer(text)) as answer:
                    for piece in answer:
                        said[name] += escape_control(piece)
                        live.update(table(said, remarks))
                remarks[name] = _remark(session, name)
        finally:
            live.update("")
            live.stop()
            console.print(table(said, remarks))


def _remark(session: Session, name: str) -> str:
    score = session.score(name)
    model = session.chat_models[name]
    parts = ["cut at its longest length"] * model.was_cut
    parts += [f"a tool call that cannot be read: {escape_control(error)}" for error in model.call_errors]
    parts += [f"/tool TEXT answers {escape_control(call['function']['name'])}" for call in model.open_calls()[:1]]
    return "; ".join(parts + ([f"score {score:.3f}"] if score is not None else []))


def table(said: dict[str, str], remarks: dict[str, str]) -> Table:
    """One column a model, as wide as the terminal allows; the remark stands below the answer."""
    from rich.table import Table
    from rich.text import Text

    out = Table(expand=True, box=None, padding=(0, 3, 0, 0))
    for name in said:
        out.add_column(Text(name), ratio=1, overflow="fold")
    out.add_row(*(Text(text) for text in said.values()))
    if any(remarks.values()):
        out.add_row(*(Text(remark, style="dim") for remark in remarks.values()))
    return out
