"""A few rows as the model will see them, trained tokens marked, before anything is trained."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hybrid_rlhf.core.text_safety import escape_control
from hybrid_rlhf.data.datasets import DataConfig, StageData, build
from hybrid_rlhf.data.source import Reads

_TRAINED = "bold green"


def preview(config: DataConfig, reads: Reads, tokenizer, console: Console | None = None,  # noqa: ANN001
            seed: int = 0, count: int = 3) -> StageData:
    """Print `count` examples of the stage's training rows and the counts of all rows; returns the data.

    Trained tokens are green on a terminal and stand in ⟦ ⟧ elsewhere. Control characters of the data are shown, not
    sent to the terminal. Raises UserError as `build` does.
    """
    console = console or Console()
    data = build(config, reads, tokenizer, seed)
    for number in range(min(count, len(data.train))):
        row = data.train[number]
        for title, ids, mask in _parts(row):
            shown = marked(tokenizer, ids, mask, brackets=not console.is_terminal or console.no_color)
            console.print(Panel(shown, title=f"{reads.stage} example {number + 1}: {title}", title_align="left"))
    console.print(_counts(reads.stage, data.report))
    return data


def _parts(row: dict) -> list[tuple[str, list[int], list[bool]]]:
    """(what it is, ids, which are trained) of a row of any kind."""
    if "input_ids" in row:
        return [(f"{len(row['input_ids'])} tokens, {sum(row['loss_mask'])} trained", row["input_ids"],
                 row["loss_mask"])]
    if "chosen_ids" in row:
        prompts = {"chosen": row["num_prompt_tokens"], "rejected": row["num_prompt_tokens_rejected"]}
        return [(f"{side}, {len(row[f'{side}_ids'])} tokens", row[f"{side}_ids"],
                 [i >= start for i in range(len(row[f"{side}_ids"]))]) for side, start in prompts.items()]
    return [(f"prompt of {len(row['prompt_ids'])} tokens", row["prompt_ids"], [False] * len(row["prompt_ids"]))]


def marked(tokenizer, ids: list[int], mask: list[bool], brackets: bool) -> Text:  # noqa: ANN001
    """Tokens as text, the masked ones green, and in ⟦ ⟧ if `brackets`."""
    out, before, end = Text(), "", 0
    for is_trained, run in groupby(mask):
        end += len(list(run))
        whole = tokenizer.decode(ids[:end], skip_special_tokens=False)  # from the start: decoders trim a first space
        piece = escape_control(whole[len(before):])
        out.append(f"⟦{piece}⟧" if brackets and is_trained else piece, style=_TRAINED if is_trained else "")
        before = whole
    return out


def _counts(stage: str, report: dict) -> Table:
    table = Table(title=f"rows of stage {stage}", title_justify="left", show_header=False)
    rows = [("read", report["read"]), ("dealt to other stages", report["other_stages"]),
            ("to train on", report["train"]), ("held out", report["held_out"]), ("truncated", report["truncated"])]
    for name, number in [*rows, *((f"dropped: {escape_control(k)}", n) for k, n in sorted(report["dropped"].items()))]:
        table.add_row(name, str(number))
    return table
