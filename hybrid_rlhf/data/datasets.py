"""Build a stage's data from its sources: read, split, tokenize (or load from the cache), blend."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.distributed import world_size
from hybrid_rlhf.core.errors import escape_control
from hybrid_rlhf.core.image_files import MAX_PIXELS
from hybrid_rlhf.core.options import check_values, one_of, within
from hybrid_rlhf.data import cache, chat, sources
from hybrid_rlhf.data.chat import SkipRow
from hybrid_rlhf.data.examples import (
    CUT_AWAY,
    IMAGES_CUT,
    MAKERS,
    NUM_FIRST,
    PROMPT_TOO_LONG,
    TOO_LONG,
    Counts,
    Lengths,
    Work,
    prepared,
)
from hybrid_rlhf.data.loader import blend, deal, is_held_out, split_key
from hybrid_rlhf.data.row_images import IMAGE, NOT_FETCHED, Files, has_images, stamp
from hybrid_rlhf.data.schema import KINDS, Example, Format, columns_hint, format_of, read_rows
from hybrid_rlhf.data.sources import Reads, Source, as_sources
from hybrid_rlhf.models.images import reader_of
from hybrid_rlhf.models.template_kwargs import check_kwargs

_CHUNK = 1000  # sequences tokenized in one call
_MEASURED, _BOUNDLESS = 200, 2**20  # rows measured where all exceed a length; tokens
_CHUNK_CHARACTERS = 4_000_000  # or this many characters, if that is less
SHOWN = 12  # columns in a line
WITH_IMAGES = "rows with images"
LOST = 0.1  # share of lost rows that gets a line of its own


@dataclass(frozen=True)
class DataConfig:
    """Which rows, and how they become tokens.

    Attributes:
        sources: Where the rows come from: a path, or a list of paths and mappings.
        split: Shares of the prompts for stages sft, reward and ppo, dealt by a hash of the prompt's text, so that no
            prompt is seen by two stages (dpo and its like take reward's share): for one file that serves all of them.
            null gives every stage every row.
        eval_sources: Rows that are only evaluated, named as `sources` are: held out beside what eval_fraction holds out
            (0 trains on all of `sources`).
        eval_fraction: Share of each stage's prompts held out for evaluation, by hash too.
        max_length: Longest sequence in tokens. Longer demonstrations lose their tail, longer pairs are dropped.
        max_prompt_length: Longest prompt in tokens for stages that sample; longer ones are dropped.
        raw: Whether strings stay as they are, transcripts too. false renders them as turns wherever the tokenizer has a
            chat template: a prompt as the user's, a completion as the assistant's. Rows of `text` always stay.
        max_pixels: Largest image in pixels, for models that read images; larger ones are scaled down.
        allow_image_urls: Whether images behind http and https URLs are fetched (20 MB each at most); false drops the
            rows that name them.
        train_on: response (assistant turns and EOS), or all tokens.
        append_eos: Whether plain-text answers end with EOS. false for text that is continued and never has to end;
            messages always end with it.
        packing: Whether several demonstrations share a row of max_length tokens (stage sft). Each attends to itself
            alone; where the model does not allow that (it is said), by a mask of all tokens by all tokens.
        max_samples: At most this many training rows, chosen by the seed.
        cache_dir: Where tokenized rows are kept (default $HYBRID_RLHF_CACHE or ~/.cache/hybrid_rlhf/data).
        chat_template: A jinja template, or a file of one, in place of the tokenizer's own.
        chat_template_kwargs: Values of the template's variables, such as {enable_thinking: false}; the saved model's
            template has them as its defaults. A column of this name has those of a row.
        score_template: How conditional_sft writes an answer's score into its prompt (into the last user turn).
    """

    sources: list[dict | str] | dict | str | None = field(default_factory=list)
    split: list[float] | None = None
    eval_sources: list[dict | str] | dict | str | None = field(default_factory=list)
    eval_fraction: float = within(0.05, "[0, 1)")
    max_length: int = within(1024, "[2,")
    max_prompt_length: int = within(256, "[2,")
    raw: bool = False
    max_pixels: int = within(MAX_PIXELS, "[1,")
    allow_image_urls: bool = False
    train_on: str = one_of("response", ("response", "all"))
    append_eos: bool = True
    packing: bool = False
    max_samples: int | None = within(None, "[1,")
    cache_dir: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    score_template: str = "Score {score:g}. {prompt}"

    def __post_init__(self) -> None:
        check_values(self, "data.")
        object.__setattr__(self, "sources", as_sources(self.sources))
        object.__setattr__(self, "eval_sources", as_sources(self.eval_sources, "data.eval_sources"))
        check(all(s.weight is None for s in self.eval_sources),
              "data.eval_sources: a source has a weight, and every row of it is evaluated once; leave it out")
        split = self.split or [1.0] * 3
        check(len(split) == 3 and all(0 <= s < float("inf") for s in split) and sum(split) > 0,
              f"data.split is {self.split}; it needs three shares (sft, reward, ppo), none negative, or null")
        check(_asks_for_a_score(self.score_template), f"data.score_template is {self.score_template!r}; it must hold "
              "{prompt} and {score}, or {score:g} and its like")
        if self.chat_template_kwargs is not None:
            check_kwargs(self.chat_template_kwargs, "data.chat_template_kwargs")
        are_set = [s.weight is not None for s in self.sources]
        check(all(are_set) or not any(are_set),
              "data.sources: some have a weight and some do not; give it to all or none")


def _asks_for_a_score(template: str) -> bool:
    try:
        filled = {template.format(prompt=p, score=s) for p in ("a", "b") for s in (0.0, 1.0)}
    except (LookupError, ValueError, AttributeError, TypeError):
        return False
    return len(filled) == 4


@dataclass
class StageData:
    """Tokenized rows of one stage and a report on all rows (plain numbers and strings).

    Rows are dicts. sft: input_ids, loss_mask. reward: chosen_ids, rejected_ids, num_prompt_tokens (of the chosen
    sequence), num_prompt_tokens_rejected, margin. kto: sft's and num_prompt_tokens, label. ppo: prompt_ids, text,
    prompt, and the other columns of the source.
    """

    train: Sequence[dict]
    held_out: Sequence[dict]
    report: dict


class OpenSource(NamedTuple):
    """A source that serves the stage, with its rows and their format."""

    source: Source
    rows: Sequence[dict]
    form: Format


def build(config: DataConfig, reads: Reads, tokenizer, seed: int) -> StageData:  # noqa: ANN001
    """The rows of a stage, tokenized, with the held-out part separate. Deterministic; `seed` touches only the blend.

    Raises UserError for sources that cannot be read or do not fit the stage, and when no usable row is left.
    """
    opened, apart = open_sources(config, reads), _open_apart(config, reads)
    tables = [_tokenized(config, each, reads, tokenizer) for each in opened]
    evaluated = [_tokenized(replace(config, eval_fraction=0.0), each, reads, tokenizer) for each in apart]
    train = blend([t[0] for t in tables], [each.source.weight for each in opened], seed, config.max_samples)
    tests = [*(t[1] for t in tables), *(t[0] for t in evaluated)]
    held_out = blend(tests, [None] * len(tests), seed)
    report = add_up([*(t[2] for t in tables), *(_as_held_out(t[2]) for t in evaluated)], len(train), len(held_out))
    if (distinct := train.num_distinct()) < len(train):
        report["distinct"] = distinct
    if config.packing and WITH_IMAGES in report["rendered"]:
        report["unpacked"] = True
    report["not_used"] = _passed_over(config, [*opened, *apart])
    is_refused = any("chat template" in reason for reason in report["dropped"])
    cure = ("data.split null gives every stage every row" if report["other_stages"] else
            "give other data, larger lengths or another data.chat_template" if is_refused else
            "give other data, or larger lengths")
    if not len(train):
        is_long = {TOO_LONG, PROMPT_TOO_LONG, CUT_AWAY, IMAGES_CUT} & report["dropped"].keys()
        cure = _longer(config, opened[0], reads, tokenizer) if is_long else cure
        raise UserError(f"no usable row for stage {reads.stage}: {describe(report)}; {cure}")
    return StageData(train, held_out, report)


def _longer(config: DataConfig, source: OpenSource, reads: Reads, tokenizer) -> str:  # noqa: ANN001
    """Advice: the length option to raise, and the lengths of the first rows of a source."""
    name = "max_prompt_length" if reads.kind == "prompt" else "max_length"
    some = source._replace(rows=[source.rows[i] for i in range(min(_MEASURED, len(source.rows)))])
    boundless = replace(config, max_length=_BOUNDLESS, max_prompt_length=_BOUNDLESS)
    train, held_out, _ = _tokenize(boundless, some, reads, tokenizer)
    needed = [max(len(ids) for key, ids in row.items() if key.endswith("ids")) for row in (*train, *held_out)]
    cure = f"raise data.{name}, which is {getattr(config, name)}"
    if not needed:
        return cure
    return (f"{cure}: of the first {len(needed)} rows the shortest has {min(needed)} tokens, the longest "
            f"{max(needed)}")


def open_sources(config: DataConfig, reads: Reads, is_needed: bool = True) -> list[OpenSource]:
    """The sources that serve a stage, read, with their formats.

    A source without `stages` that lacks what the stage needs is skipped, as long as another one serves. Raises
    UserError if none does and `is_needed`, or if one that names the stage does not.
    """
    meant = [s for s in config.sources if not s.stages or reads.stage in s.stages]
    check(bool(meant) or not is_needed, f"no data source for stage {reads.stage}: data.sources "
                       + ("is empty; give a path or a list of them" if not config.sources else
                          f"names other stages only; add {reads.stage} to `stages` of one"))
    opened = [OpenSource(s, rows, format_of(rows, s.path)) for s in meant for rows in [sources.read(s)]]
    serving = [o for o in opened if reads.kind in KINDS[o.form.kind]]
    for entry in opened:
        needed = entry.source.stages or (is_needed and not serving)
        others = [name for name in entry.rows[0] if name not in entry.form.required]
        names = {"pair": ("chosen", "rejected"), "labelled answer": ("completion", "label")}.get(
            reads.kind, ("completion",) if "prompt" in entry.form.required else ("prompt", "completion"))
        cure = f", or name its columns: {columns_hint(entry.source.path, others, names)}" if others else ""
        check(entry in serving or not needed,
              f"{entry.source.path} is {entry.form.name} data ({', '.join(entry.form.required)}"
              f"{'; not read: ' * bool(others)}{', '.join(others)}), which holds no {reads.kind}s for stage "
              f"{reads.stage}; give other data{cure}")
    return serving


def examples(config: DataConfig, entry: OpenSource, reads: Reads, counts: Counter,
             lost: Callable[[str, int], None] = lambda _reason, _row: None) -> Iterator[tuple[Example, bool]]:
    """The stage's rows of one source, in canonical form, with whether they are held out.

    Updates counts ("read" and "other_stages"); lost is called with the reason and the number of each dropped row.
    """
    counts["read"] += len(entry.rows)
    for example in read_rows(entry.rows, entry.form, entry.source.path, lost, config.raw):
        text = split_key(example)
        if config.split and deal(text, config.split) != reads.share:
            counts["other_stages"] += 1
        else:
            yield example, is_held_out(text, config.eval_fraction)


def _tokenized(config: DataConfig, entry: OpenSource, reads: Reads, tokenizer) -> cache.Tables:  # noqa: ANN001
    """One source's tables, from the cache or newly tokenized."""
    settings = {"training": reads.kind, "lengths": _lengths_of(config), "append_eos": config.append_eos,
                "split": config.split, "share": reads.share if config.split else None,
                "eval_fraction": config.eval_fraction, "format": entry.form.name, "path": entry.source.path}
    files = _files_of(config, entry)

    def images(row: dict) -> str:
        reader = reader_of(tokenizer) if has_images(row) else None
        return "" if reader is None else f"{reader.settings} {files} {stamp(row, files.folder)}"

    path = cache.folder(config.cache_dir) / cache.key(entry.rows, tokenizer, settings, images)
    tables = cache.load(path)
    if tables is None:
        tables = _tokenize(config, entry, reads, tokenizer)
        if NOT_FETCHED not in tables[2]["dropped"] or world_size() > 1:  # the next run tries again; processes share it
            cache.store(path, tables)
    return tables


def _files_of(config: DataConfig, entry: OpenSource) -> Files:
    return Files(sources.folder_of(entry.source), cache.folder(config.cache_dir) / "images", config.max_pixels,
                 config.allow_image_urls)


def _lengths_of(config: DataConfig) -> Lengths:
    return Lengths(config.max_length, config.max_prompt_length, config.train_on, config.score_template, config.raw)


def _tokenize(config: DataConfig, entry: OpenSource, reads: Reads, tokenizer) -> cache.Tables:  # noqa: ANN001
    lengths = _lengths_of(config)
    rows: tuple[list, list] = ([], [])
    seen, counts = Counter(read=0, other_stages=0), Counts()
    waiting: list[tuple[Work, bool, int]] = []
    max_tokens, num_characters = max(lengths.max_length, lengths.max_prompt_length), 0

    def finish() -> None:
        texts = [text for work, _, _ in waiting for text in work.texts]
        encoded = iter(chat.encode_first(tokenizer, texts, max_tokens, config.append_eos))
        for work, is_eval, counts.row in waiting:
            row = work.finish([next(encoded) for _ in work.texts], counts)
            if row is not None:
                if "images" in row:
                    counts.rendered[WITH_IMAGES] += 1
                rows[is_eval].append(row)
        waiting.clear()

    make, files = MAKERS[reads.kind], _files_of(config, entry)
    for example, is_eval in examples(config, entry, reads, seen, counts.drop):
        counts.row = example.row
        try:
            ready = prepared(example, tokenizer, lengths, counts, files)
            works = list(make(ready, tokenizer, lengths))
        except SkipRow as reason:
            counts.drop(str(reason))
            continue
        waiting += [(work, is_eval, example.row) for work in works]
        num_characters += sum(len(text.text) for work in works for text in work.texts)
        if len(waiting) >= _CHUNK or num_characters >= _CHUNK_CHARACTERS:
            finish()
            num_characters = 0
    finish()
    name = Path(entry.source.path).name
    first = {why: [f"{name} row {row}" for row in rows] for why, rows in counts.first.items()}
    numbers = {**seen, "truncated": counts.truncated, "dropped": dict(counts.dropped), "dropped_first": first,
               "rendered": dict(counts.rendered), "unread": dict(counts.unread), "train": len(rows[0]),
               "held_out": len(rows[1])}
    return rows[0], rows[1], numbers


def _open_apart(config: DataConfig, reads: Reads) -> list[OpenSource]:
    """The eval_sources that serve a stage; may be empty, as with the texts of ptx."""
    try:
        return open_sources(replace(config, sources=config.eval_sources), reads, is_needed=False)
    except UserError as error:  # its text names data.sources
        raise UserError(str(error).replace("data.sources", "data.eval_sources")) from error


def _as_held_out(counts: dict) -> dict:
    return counts | {"train": 0, "held_out": counts["train"]}


def _passed_over(config: DataConfig, opened: Sequence[OpenSource]) -> list[str]:
    """Paths of the sources without `stages` that hold nothing for this stage."""
    serving = [entry.source for entry in opened]
    return [s.path for s in [*config.sources, *config.eval_sources] if not s.stages and s not in serving]


def is_conversational(config: DataConfig, reads: Reads) -> bool:
    """Whether any source of a stage holds messages, by its first row: they need a chat template."""
    return any(isinstance(part, list) for example in _first_rows(config, reads)
               for part in (example.messages, example.prompt, *(answer for answer, _ in example.answers)))


def has_plain_prompts(config: DataConfig, reads: Reads) -> bool:
    """Whether any source of a stage holds prompts of plain text, by its first row: data.raw affects them."""
    return any(isinstance(example.prompt, str) and not example.is_text_pair for example in _first_rows(config, reads))


def _first_rows(config: DataConfig, reads: Reads) -> Iterator[Example]:
    for entry in open_sources(config, reads):
        yield from (example for example, _ in islice(examples(config, entry, reads, Counter()), 1))


def raw_texts(config: DataConfig, reads: Reads, seed: int = 0) -> Iterator[str]:
    """The texts of the stage's training rows, without held-out ones, to train a tokenizer on. `seed` is ignored."""
    for entry in open_sources(config, reads):
        for example, is_eval in examples(config, entry, reads, Counter()):
            if not is_eval:
                answers = [answer for answer, _ in example.answers]
                for part in (example.text, example.messages or example.prompt, *answers):
                    yield from _spoken(part)


def _spoken(part: chat.Text | None) -> Iterator[str]:
    """A string unchanged; messages as ChatML writes them between its markers, tools and calls as JSON."""
    if isinstance(part, str):
        yield part
    for message in part if isinstance(part, list) else ():
        yield f"{message['role']}\n{message['content'].replace(IMAGE, '')}"
        for name in ("tools", "tool_calls"):
            yield from (json.dumps(each, ensure_ascii=False) for each in message.get(name, ()))


def add_up(parts: Sequence[dict], num_train: int, num_held_out: int) -> dict:
    """Sum the sources' counts; train and held_out count the rows after blending."""
    total = {name: sum(p[name] for p in parts) for name in ("read", "other_stages", "truncated")}
    dropped, rendered, unread = (dict(sum((Counter(p[name]) for p in parts), Counter()))
                                 for name in ("dropped", "rendered", "unread"))
    usable = sum(p["train"] for p in parts)
    first = {why: [row for p in parts for row in p.get("dropped_first", {}).get(why, ())][:NUM_FIRST]
             for why in dropped}
    return {**total, "dropped": dropped, "dropped_first": first, "rendered": rendered, "usable": usable,
            "train": num_train, "held_out": num_held_out, **({"unread": unread} if unread else {})}


def counts(report: dict) -> list[tuple[str, int]]:
    """Counts of the rows that were not dropped; zeros are left out, except of the main counts."""
    rows = [("rows read", report["read"]), ("to train on", report["train"]), ("held out", report["held_out"])]
    more = [("assigned to other stages", report["other_stages"]), ("truncated", report["truncated"])]
    return rows + [(name, number) for name, number in more if number]


def dropped(report: dict) -> list[tuple[str, int]]:
    """Reasons for dropping rows, with the first of them, and counts; control characters are escaped."""
    named = []
    for why, number in sorted(report["dropped"].items()):
        first = report.get("dropped_first", {}).get(why, [])  # absent in older caches
        more = " and others" if number > len(first) else ""
        named.append((escape_control(f"{why} ({', '.join(first)}{more})" if first else why), number))
    return named


def describe(report: dict) -> str:
    """A report in one line."""
    return ", ".join([f"{number} {name}" for name, number in counts(report)] + _rendered(report) + drops(report))


def _rendered(report: dict) -> list[str]:
    return [f"{n} {how}" for how, n in sorted(report.get("rendered", {}).items())]


def drops(report: dict) -> list[str]:
    """How many rows were dropped, by reason, and the first of them."""
    return [f"{number} dropped: {reason}" for reason, number in dropped(report)]


def unread(report: dict) -> list[str]:
    """A line that names the columns with text that the run does not read, if there are any."""
    names = [escape_control(str(name)) for name in report.get("unread", {})]
    if not names:
        return []
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    return [f"columns that are not read: {shown} (to read one, name it in the source's columns, such as {{context: "
            f"{names[0]}}})"]


def summary(report: dict, name: str | None = None) -> list[str]:
    """The report as lines for the start of a run: counts, how rows were rendered, the columns that are not read, and a
    warning where over a tenth of the rows is missing or cut.

    These are dropped and truncated rows, and those that data.split assigns to other stages. name: of rows beside the
    stage's own.
    """
    usable, data = report.get("usable", report["train"]), f"data of {name}" if name else "data"
    lines = [f"{data}: {describe(report | {'rendered': {}})}"]
    if usable != report["train"]:
        lines[0] += f" (chosen from {usable} by weights and data.max_samples)"
    elif "distinct" in report:
        lines[0] += f" (by weights: {report['distinct']} different ones in an epoch, and others in the next)"
    lines += [f"{data}: {'; '.join(_rendered(report))}"] * bool(report.get("rendered"))
    lines += [f"{data}: data.packing is off, since rows with images are not packed"] * bool(report.get("unpacked"))
    lines += [f"{data}: {line}" for line in unread(report)]
    if report.get("not_used"):
        lines.append(f"{data}: nothing for {name or 'this stage'} in {', '.join(report['not_used'])}")
    faulty, elsewhere = sum(report["dropped"].values()) + report["truncated"], report["other_stages"]
    total = usable + report["held_out"] + elsewhere + sum(report["dropped"].values())
    if faulty + elsewhere > LOST * total:
        reasons = [f"{elsewhere} assigned to other stages "
                   "(data.split null gives this stage every row)"] * bool(elsewhere)
        reasons += [f"{report['truncated']} cut to data.max_length"] * bool(report["truncated"]) + drops(report)
        lines.append(f"{'warning' if faulty > LOST * total else 'note'}: {faulty + elsewhere} of {total} rows "
                     f"({(faulty + elsewhere) / total:.0%}) are missing or cut in {name or 'this stage'}: "
                     f"{'; '.join(reasons)}")
    return lines
