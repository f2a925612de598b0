"""Preview of a stage's data: some rows as the model sees them, with trained tokens marked."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from hybrid_rlhf.core.errors import escape_control
from hybrid_rlhf.data.datasets import DataConfig, StageData, build, counts, dropped
from hybrid_rlhf.data.sources import Reads

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_TRAINED = "bold green"


class Piece(NamedTuple):
    """A run of text in a row, and whether its tokens are trained."""

    text: str
    is_trained: bool


class Shown(NamedTuple):
    """One row as the model sees it, or one side of a pair."""

    title: str
    pieces: list[Piece]


class Preview(NamedTuple):
    """A stage's data, and some of its training rows."""

    stage: str
    data: StageData
    rows: list[Shown]


def look(config: DataConfig, reads: Reads, tokenizer, seed: int = 0, count: int = 3, stage: str = "",  # noqa: ANN001
         ) -> Preview:
    """The stage's data and `count` of its training rows as text. Raises UserError as `build` does. stage: its name, if
    it reads as another stage does, such as grpo as ppo."""
    data = build(config, reads, tokenizer, seed)
    if reads.kind == "prompt":  # reward functions report at the start of a run which columns they read
        data.report.pop("unread", None)
    rows = [Shown(f"{stage or reads.stage} example {number + 1}: {title}", pieces(tokenizer, ids, mask))
            for number in range(min(count, len(data.train))) for title, ids, mask in _parts(data.train[number])]
    return Preview(stage or reads.stage, data, rows)


def show(shown: Preview, console: Console | None = None) -> None:
    """Print rows, and the counts of all rows.

    Trained tokens are green on a terminal and in ⟦ ⟧ elsewhere. Control characters of the data are escaped.
    """
    from rich.console import Console
    from rich.panel import Panel

    console = console or Console()
    for row in shown.rows:
        text = marked(row.pieces, brackets=not console.is_terminal or console.no_color)
        console.print(Panel(text, title=row.title, title_align="left"))
    console.print(_counts(shown.stage, shown.data.report))


def _parts(row: dict) -> list[tuple[str, list[int], list[bool]]]:
    """(title, ids, mask of trained tokens) of each part of a row of any kind."""
    if "input_ids" in row:
        return [(f"{len(row['input_ids'])} tokens, {sum(row['loss_mask'])} trained", row["input_ids"],
                 row["loss_mask"])]
    if "chosen_ids" in row:
        prompts = {"chosen": row["num_prompt_tokens"], "rejected": row["num_prompt_tokens_rejected"]}
        return [(f"{side}, {len(row[f'{side}_ids'])} tokens", row[f"{side}_ids"],
                 [i >= start for i in range(len(row[f"{side}_ids"]))]) for side, start in prompts.items()]
    return [(f"prompt of {len(row['prompt_ids'])} tokens", row["prompt_ids"], [False] * len(row["prompt_ids"]))]


def pieces(tokenizer, ids: list[int], mask: list[bool]) -> list[Piece]:  # noqa: ANN001
    """Tokens as text, split where the mask changes; control characters are escaped."""
    result, before, end = [], "", 0
    for is_trained, run in groupby(mask):
        end += len(list(run))
        text = tokenizer.decode(ids[:end], skip_special_tokens=False)  # from the start: decoders trim a first space
        result.append(Piece(escape_control(text[len(before):]), bool(is_trained)))
        before = text
    return result


def marked(pieces: list[Piece], brackets: bool) -> Text:
    """The pieces, the trained ones green, and in ⟦ ⟧ if `brackets`."""
    from rich.text import Text

    out = Text()
    for text, is_trained in pieces:
        out.append(f"⟦{text}⟧" if brackets and is_trained else text, style=_TRAINED if is_trained else "")
    return out


def _counts(stage: str, report: dict) -> Table:
    from rich.table import Table

    table = Table(title=f"rows of stage {stage}", title_justify="left", show_header=False)
    unread = ((f"column not read: {escape_control(str(c))}", n) for c, n in report.get("unread", {}).items())
    rendered = sorted(report.get("rendered", {}).items())
    for name, number in [*counts(report), *rendered, *((f"dropped: {why}", n) for why, n in dropped(report)), *unread]:
        table.add_row(name, str(number))
    return table
