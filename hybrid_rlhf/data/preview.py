"""Preview of a stage's data: some rows as the model sees them, with trained tokens marked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from hybrid_rlhf.core.errors import escape_control
from hybrid_rlhf.core.image_files import ImageRef
from hybrid_rlhf.data.datasets import DataConfig, StageData, build, counts, dropped
from hybrid_rlhf.data.sources import Reads
from hybrid_rlhf.models.images import reader_of

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
    images: Sequence[str] = ()  # files


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
    some = [data.train[i] for i in range(min(count, len(data.train)))]
    rows = [Shown(f"{stage or reads.stage} example {number}: {title}",
                  pieces(tokenizer, ids, mask, row.get("images", ())), [image[0] for image in row.get("images", ())])
            for number, row in enumerate(some, 1) for title, ids, mask in _parts(row)]
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


def pieces(tokenizer, ids: list[int], mask: list[bool], images: Sequence = ()) -> list[Piece]:  # noqa: ANN001
    """Tokens as text, split where the mask changes; control characters are escaped. The tokens of an image are its size
    and their number; images: [path, width, height] each."""
    result, before, end = [], "", 0
    shown = _images_shown(tokenizer, ids, images) if images else [None] * len(ids)
    for (is_trained, image), run in groupby(zip(map(bool, mask), shown, strict=True)):
        end += len(list(run))
        text = tokenizer.decode(ids[:end], skip_special_tokens=False)  # from the start: decoders trim a first space
        result.append(Piece(escape_control(text[len(before):]) if image is None else image[1], is_trained))
        before = text
    return result


def _images_shown(tokenizer, ids: list[int], images: Sequence) -> list:  # noqa: ANN001
    """For each token the number of its image and what to show for that, or None."""
    reader = reader_of(tokenizer)
    shown: list[tuple[int, str] | None] = [None] * len(ids)
    places = [i for i, token in enumerate(ids) if token in reader.token_ids]
    for number, image in enumerate(ImageRef(*each) for each in images):
        count = reader.read(image).num_tokens
        first, last = places[0], places[count - 1]
        label = number, f"[image {image.width}x{image.height}, {count} tokens]"
        shown[first : last + 1] = [label] * (last + 1 - first)
        places = places[count:]
    return shown


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
