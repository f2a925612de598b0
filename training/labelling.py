"""Sample the missing responses to prompts, and make preferences of them by a judge or a reward model."""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.strict_json import loads, to_json
from hybrid_rlhf.data import chat, labels
from hybrid_rlhf.data.chat import SkipRow
from hybrid_rlhf.data.labels import Asked, prompt_key
from hybrid_rlhf.data.messages import kwargs_of, tools_of, with_tools
from hybrid_rlhf.data.turns import with_kwargs
from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.models import load
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.template_kwargs import KWARGS
from hybrid_rlhf.models.tokenizer import completion_text
from hybrid_rlhf.report.terminal import ProgressLine
from hybrid_rlhf.rewards import RewardSource
from hybrid_rlhf.rewards.judge import JudgeSource
from hybrid_rlhf.rewards.judge.judge_config import ABSOLUTE, PAIRWISE
from hybrid_rlhf.rewards.judge.local_backend import fingerprint
from hybrid_rlhf.run.reporter import Lines
from hybrid_rlhf.training import scored_answers

SAMPLED_AT_ONCE = 64  # prompts between two writes of the samples
TOO_LONG, FEW = "a prompt that is too long to be answered", "a prompt with fewer than two different responses"
MANY_CHANGED = 0.3  # of the verdicts


@dataclass
class Judged:
    """Counts of judged pairs, and the preferences. rows: preferences to be written; compared: pairs with a verdict or a
    failure; ties: without a better response; failures: pairs without a verdict; changed: pairs whose two orders
    disagree; ordered: pairs that were shown in both orders; prompts: prompts that have been judged."""

    rows: list[dict] = field(default_factory=list)
    compared: int = 0
    ties: int = 0
    failures: int = 0
    changed: int = 0
    ordered: int = 0
    prompts: int = 0


@dataclass(frozen=True)
class PairFilter:
    """Which pairs of a prompt are kept: all, or its best against its worst; those whose scores differ by min_margin;
    and whether the difference becomes the column margin."""

    keep: str = "all"
    min_margin: float = 0.0
    margin: bool = False


def sample(asked: Sequence[Asked], model: ModelConfig, tokenizer, sampling: SamplingConfig, place: Path, *,  # noqa: ANN001
           raw: bool, max_prompt_length: int, seed: int, lost: Counter) -> int:
    """Add a model's responses to those of the prompts; samples of an earlier process in the file `place` are reused.
    Returns how many were cut at sampling.max_new_tokens. The model is freed when this returns."""
    folder = str(model.model_name_or_path)
    digest = hashlib.sha256("\n".join(prompt_key(each.prompt) for each in asked).encode("utf-8", "backslashreplace"))
    drawn = SampleFile(place, {"model": folder, "weights": fingerprint(folder), "prompts": digest.hexdigest(),
                               "sampling": vars(sampling), "seed": seed, "raw": raw, "dtype": model.dtype,
                               "load_in_4bit": model.load_in_4bit, "max_prompt_length": max_prompt_length})
    ids = _prompt_ids(asked, tokenizer, _room(model, sampling, max_prompt_length), raw, lost)
    waiting = [number for number in ids if number not in drawn.known]
    if waiting:
        _draw(ids, waiting, model, tokenizer, sampling, seed, drawn)
    drawn.close()
    for number in ids:
        labels.add(asked[number], drawn.known[number][0], lost)
    return sum(drawn.known[number][1] for number in ids)


def _room(model: ModelConfig, sampling: SamplingConfig, max_prompt_length: int) -> int:
    """The longest prompt, in tokens, that leaves room for an answer."""
    positions = load.configured_positions(model)
    if positions is None:
        return max_prompt_length
    check(positions > sampling.max_new_tokens, f"label: max_new_tokens is {sampling.max_new_tokens}, and "
          f"{model.model_name_or_path} has {positions} positions; lower it")
    return min(max_prompt_length, positions - sampling.max_new_tokens)


def _prompt_ids(asked: Sequence[Asked], tokenizer, longest: int, raw: bool, lost: Counter  # noqa: ANN001
                ) -> dict[int, list[int]]:
    """Token ids of the prompts that leave room for an answer, by number."""
    by_number = {}
    for number, each in enumerate(asked):
        try:
            turns = with_tools(chat.as_turn(tokenizer, each.prompt, raw), tools_of(each.columns.get("tools")))
            turns = with_kwargs(turns, kwargs_of(each.columns.get(KWARGS)))
            ids = chat.encode_prompt(tokenizer, turns or "")
        except SkipRow as reason:
            lost[str(reason)] += 1
            continue
        if len(ids) > longest:
            lost[TOO_LONG] += 1
        else:
            by_number[number] = ids
    return by_number


@torch.no_grad()
def _draw(ids: dict[int, list[int]], waiting: Sequence[int], model: ModelConfig, tokenizer,  # noqa: ANN001
          sampling: SamplingConfig, seed: int, drawn: SampleFile) -> None:
    """Sample the missing responses. A sample depends on its prompt's number and the seed, not on its batch."""
    actor, size, progress = scored_answers.open_actor(model, tokenizer), sampling.num_samples, ProgressLine("label")
    with actor.inference():
        for first in range(0, len(waiting), SAMPLED_AT_ONCE):
            some = waiting[first : first + SAMPLED_AT_ONCE]
            sampled = actor.engine.generate([ids[n] for n in some for _ in range(size)], sampling, seed,
                                          numbers=[n * size + k for n in some for k in range(size)])
            ended = [reason == "eos" for reason in sampled.finish_reasons]
            texts = [completion_text(tokenizer, *row) for row in zip(sampled.tokens, ended, strict=True)]
            for k, number in enumerate(some):
                rows = slice(k * size, (k + 1) * size)
                drawn.add(number, texts[rows], size - sum(ended[rows]))
            drawn.sync()
            progress.update(f"{len(drawn.known)} of {len(ids)} prompts have samples")
    del actor
    gc.collect()


def judged(asked: Sequence[Asked], source: RewardSource, rule: PairFilter, batch_size: int, tally: Judged,
           tokenizer=None) -> None:  # noqa: ANN001
    """Judge the responses of every prompt that has two, `batch_size` prompts at a time, and add what comes out to
    `tally`, which holds the prompts judged before an error too. UserError where the first of several batches has no
    verdict at all."""
    ready, progress = [each for each in asked if len(each.responses) > 1], ProgressLine("label")
    for first in range(0, len(ready), batch_size):
        batch = ready[first : first + batch_size]
        shares = _compared(batch, source, tally) if isinstance(
            source, JudgeSource) and source.config.mode == PAIRWISE else _scored(batch, source, tally, tokenizer)
        for each, known in zip(batch, shares, strict=True):
            _add_rows(each, known, rule, tally)
        tally.prompts += len(batch)
        check(tally.failures < tally.compared or tally.prompts == len(ready) or first > 0,
              f"label: none of the first {tally.compared} pairs has a verdict, and no other is asked about; look "
              "at what the judge is asked and says, then run the same command again")
        progress.update(f"{tally.prompts} of {len(ready)} prompts judged, {len(tally.rows)} pairs")


Known = tuple[dict[tuple[int, int], tuple[float, float]], list[float | None]]  # scores of pairs, scores of responses


def _compared(batch: Sequence[Asked], source: JudgeSource, tally: Judged) -> list[Known]:
    """Compare every two responses to a prompt, in both orders. A response's score is its share of wins."""
    places = [(n, i, j) for n, each in enumerate(batch) for i, j in combinations(range(len(each.responses)), 2)]
    results = source.compare([batch[n].prompt for n, _, _ in places], [batch[n].responses[i] for n, i, _ in places],
                             [batch[n].responses[j] for n, _, j in places])
    pairs: list[dict[tuple[int, int], tuple[float, float]]] = [{} for _ in batch]
    wins: list[list[list[float]]] = [[[] for _ in each.responses] for each in batch]
    for (n, i, j), each in zip(places, results, strict=True):
        tally.compared += 1
        tally.failures += each.share is None
        tally.ordered += each.is_consistent is not None
        tally.changed += each.is_consistent is False
        if each.share is not None:
            pairs[n][i, j] = (each.share, 1 - each.share)
            wins[n][i].append(each.share)
            wins[n][j].append(1 - each.share)
    means = [[fmean(shares) if shares else None for shares in each] for each in wins]
    return list(zip(pairs, means, strict=True))


def _scored(batch: Sequence[Asked], source: Any, tally: Judged, tokenizer) -> list[Known]:  # noqa: ANN001
    """Score every response, by itself or relative to the others of its prompt, and pair them by score."""
    owners = [n for n, each in enumerate(batch) for _ in each.responses]
    prompts, texts = [batch[n].prompt for n in owners], [text for each in batch for text in each.responses]
    if isinstance(source, JudgeSource) and source.config.mode == ABSOLUTE:
        scores = [None if grade is None else grade.score for grade in source.grade(prompts, texts)]
    else:
        columns = [batch[n].columns for n in owners]
        scores = scored_answers.scores_of(source, prompts, texts, columns, tokenizer, len(texts), owners)
    out: list[Known] = []
    for each in batch:
        group, scores = scores[: len(each.responses)], scores[len(each.responses) :]
        pairs = {}
        for i, j in combinations(range(len(group)), 2):
            a, b = group[i], group[j]
            tally.compared += 1
            if a is None or b is None:
                tally.failures += 1
            else:
                pairs[i, j] = (a, b)
        out.append((pairs, group))
    return out


def _add_rows(asked: Asked, known: Known, rule: PairFilter, tally: Judged) -> None:
    """The preferences of one prompt."""
    pairs, scores = known
    if rule.keep == "best_worst":
        order = sorted((i for i, score in enumerate(scores) if score is not None), key=lambda i: -scores[i])
        pairs = {(order[0], order[-1]): (scores[order[0]], scores[order[-1]])} if len(order) > 1 else {}
    for (i, j), (a, b) in pairs.items():
        if a == b or abs(a - b) < rule.min_margin:
            tally.ties += 1
            continue
        better, worse = (i, j) if a > b else (j, i)
        more = {"score_chosen": max(a, b), "score_rejected": min(a, b)}
        if rule.margin:
            more["margin"] = abs(a - b)
        tally.rows.append(labels.pair_row(asked, asked.responses[better], asked.responses[worse], more))


def lines_of(tally: Judged, source: Any) -> Iterator[str]:
    """The tally and the judge's cost, in sentences."""
    yield (f"{len(tally.rows)} pairs kept of {tally.compared} that {source.name} judged, of {tally.prompts} prompts; "
           f"{tally.ties} ties, {tally.failures} without a verdict")
    if tally.ordered:
        yield (f"{tally.changed} of {tally.ordered} verdicts ({tally.changed / tally.ordered:.1%}) changed with the "
               "order of the two responses")
        if tally.changed > MANY_CHANGED * tally.ordered:
            yield ("warning: so many verdicts follow the order and not the responses; measure this judge by "
                   "--evaluate.labels before anything is trained on it")
    if isinstance(source, JudgeSource):
        spent, counts = source.budget, source.asker.counts
        cost = f", cost {spent.cost:.4g}" if spent.cost else ""
        yield (f"{spent.calls} calls to the judge ({counts.cached} of {counts.questions} questions were answered "
               f"before), {spent.num_input:,} tokens read, {spent.num_output:,} written{cost}")


class SampleFile:
    """An append-only file of samples (JSON lines) of a command that may be interrupted; its first line has the
    settings. known: a prompt's number -> its samples, and how many were cut at the longest length."""

    def __init__(self, path: Path, settings: dict) -> None:
        """Continue the file at `path`, or create it. An incomplete last line, of a process that was killed, is removed.
        Raises UserError where the samples were drawn with other settings."""
        self.known: dict[int, tuple[list[str], int]] = {}
        end = self._read(path, settings) if path.exists() else 0
        self._lines = Lines(path, lambda text: print(text, file=sys.stderr), position=end)
        if end == 0:
            self._lines.write(to_json({"settings": settings}))
            self._lines.sync()

    def _read(self, path: Path, settings: dict) -> int:
        """Read the file's samples; returns where its last complete line ends."""
        text = path.read_bytes()
        end = text.rfind(b"\n") + 1
        if not end or not text.strip():
            return 0
        try:
            first, *rows = map(loads, text[:end].splitlines())
            recorded, wanted = dict(first["settings"]), json.loads(to_json(settings))
            self.known = {row["number"]: (row["responses"], row["cut"]) for row in rows}
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"label: {path} is not a file of samples; remove it, or give another --output") from error
        changed = [name for name in wanted if recorded.get(name) != wanted[name]]
        check(not changed, f"label: {path} holds samples of other settings ({', '.join(changed)}); remove it, or give "
                           "another --output")
        return end

    def add(self, number: int, responses: Sequence[str], cut: int) -> None:
        """Append the samples of one prompt."""
        self.known[number] = (list(responses), cut)
        self._lines.write(to_json({"number": number, "responses": list(responses), "cut": cut}))

    def sync(self) -> None:
        """Flush all lines to the disk. Raises OSError on a full disk."""
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()
