"""Responses to prompts, sampled where they are not there, and what a judge or a reward model prefers among them."""

from __future__ import annotations

import gc
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from hybrid_rlhf.core.config import check
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
from hybrid_rlhf.training import scored_answers
from hybrid_rlhf.training.sample_file import SampleFile
from hybrid_rlhf.training.written_answers import scores_of

SAMPLED_AT_ONCE = 64  # prompts between two writes of the samples
TOO_LONG, FEW = "a prompt that is too long to be answered", "a prompt with fewer than two different responses"
MANY_CHANGED = 0.3  # of the verdicts


@dataclass
class Judged:
    """What became of the pairs of responses. rows: preferences to be written; compared: pairs that have a verdict or
    failed; ties: without a better one; failures: pairs without a verdict; changed: pairs whose two orders disagree;
    ordered: those that were shown in two orders; prompts: that have been judged."""

    rows: list[dict] = field(default_factory=list)
    compared: int = 0
    ties: int = 0
    failures: int = 0
    changed: int = 0
    ordered: int = 0
    prompts: int = 0


@dataclass(frozen=True)
class Choice:
    """Which pairs of a prompt are kept: all, or its best against its worst; those whose scores differ by min_margin;
    and whether the difference becomes the column margin."""

    keep: str = "all"
    min_margin: float = 0.0
    margin: bool = False


def sample(asked: Sequence[Asked], model: ModelConfig, tokenizer, sampling: SamplingConfig, place: Path, *,  # noqa: ANN001
           raw: bool, max_prompt_length: int, seed: int, lost: Counter) -> int:
    """Add a model's responses to those of the prompts; what `place` has of an earlier process is not drawn again.
    Returns how many were cut at sampling.max_new_tokens. The model is gone when this returns."""
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
    """Token ids of the prompts that can be answered, by number."""
    found = {}
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
            found[number] = ids
    return found


@torch.no_grad()
def _draw(ids: dict[int, list[int]], waiting: Sequence[int], model: ModelConfig, tokenizer,  # noqa: ANN001
          sampling: SamplingConfig, seed: int, drawn: SampleFile) -> None:
    """Sample what is missing. A sample follows from its prompt's number and the seed, whatever is drawn beside it."""
    actor, size, progress = scored_answers.open_actor(model, tokenizer), sampling.num_samples, ProgressLine("label")
    with actor.inference():
        for first in range(0, len(waiting), SAMPLED_AT_ONCE):
            some = waiting[first : first + SAMPLED_AT_ONCE]
            found = actor.engine.generate([ids[n] for n in some for _ in range(size)], sampling, seed,
                                          numbers=[n * size + k for n in some for k in range(size)])
            ended = [reason == "eos" for reason in found.finish_reasons]
            texts = [completion_text(tokenizer, *row) for row in zip(found.tokens, ended, strict=True)]
            for k, number in enumerate(some):
                own = slice(k * size, (k + 1) * size)
                drawn.add(number, texts[own], size - sum(ended[own]))
            drawn.sync()
            progress.tell(f"{len(drawn.known)} of {len(ids)} prompts have samples")
    del actor
    gc.collect()


def judged(asked: Sequence[Asked], source: RewardSource, choice: Choice, batch_size: int, found: Judged,
           tokenizer=None) -> None:  # noqa: ANN001
    """Judge the responses of every prompt that has two, `batch_size` prompts at a time, and add what comes out to
    `found`: it holds the prompts that were judged before an error too. UserError where the first of several batches has
    no verdict at all."""
    ready, progress = [each for each in asked if len(each.responses) > 1], ProgressLine("label")
    for first in range(0, len(ready), batch_size):
        batch = ready[first : first + batch_size]
        shares = _compared(batch, source, found) if isinstance(
            source, JudgeSource) and source.config.mode == PAIRWISE else _scored(batch, source, found, tokenizer)
        for each, known in zip(batch, shares, strict=True):
            _add_rows(each, known, choice, found)
        found.prompts += len(batch)
        check(found.failures < found.compared or found.prompts == len(ready) or first > 0,
              f"label: none of the first {found.compared} pairs has a verdict, and no other is asked about; look "
              "at what the judge is asked and says, then run the same command again")
        progress.tell(f"{found.prompts} of {len(ready)} prompts judged, {len(found.rows)} pairs")


Known = tuple[dict[tuple[int, int], tuple[float, float]], list[float | None]]  # scores of pairs, scores of responses


def _compared(batch: Sequence[Asked], source: JudgeSource, found: Judged) -> list[Known]:
    """Every two responses to a prompt, compared in both orders. A response's score is its share of wins."""
    places = [(n, i, j) for n, each in enumerate(batch) for i, j in combinations(range(len(each.responses)), 2)]
    said = source.compare([batch[n].prompt for n, _, _ in places], [batch[n].responses[i] for n, i, _ in places],
                          [batch[n].responses[j] for n, _, j in places])
    pairs: list[dict[tuple[int, int], tuple[float, float]]] = [{} for _ in batch]
    wins: list[list[list[float]]] = [[[] for _ in each.responses] for each in batch]
    for (n, i, j), each in zip(places, said, strict=True):
        found.compared += 1
        found.failures += each.share is None
        found.ordered += each.is_consistent is not None
        found.changed += each.is_consistent is False
        if each.share is not None:
            pairs[n][i, j] = (each.share, 1 - each.share)
            wins[n][i].append(each.share)
            wins[n][j].append(1 - each.share)
    return [(of, [fmean(own) if own else None for own in each]) for of, each in zip(pairs, wins, strict=True)]


def _scored(batch: Sequence[Asked], source: Any, found: Judged, tokenizer) -> list[Known]:  # noqa: ANN001
    """Every response with a score of its own, or relative to the others of its prompt."""
    owners = [n for n, each in enumerate(batch) for _ in each.responses]
    prompts, texts = [batch[n].prompt for n in owners], [text for each in batch for text in each.responses]
    if isinstance(source, JudgeSource) and source.config.mode == ABSOLUTE:
        scores = [None if grade is None else grade.score for grade in source.grade(prompts, texts)]
    else:
        scores = scores_of(source, prompts, texts, [batch[n].columns for n in owners], tokenizer, len(texts), owners)
    out: list[Known] = []
    for each in batch:
        own, scores = scores[: len(each.responses)], scores[len(each.responses) :]
        pairs = {}
        for i, j in combinations(range(len(own)), 2):
            a, b = own[i], own[j]
            found.compared += 1
            if a is None or b is None:
                found.failures += 1
            else:
                pairs[i, j] = (a, b)
        out.append((pairs, own))
    return out


def _add_rows(asked: Asked, known: Known, choice: Choice, found: Judged) -> None:
    """The preferences of one prompt."""
    pairs, scores = known
    if choice.keep == "best_worst":
        order = sorted((i for i, score in enumerate(scores) if score is not None), key=lambda i: -scores[i])
        pairs = {(order[0], order[-1]): (scores[order[0]], scores[order[-1]])} if len(order) > 1 else {}
    for (i, j), (a, b) in pairs.items():
        if a == b or abs(a - b) < choice.min_margin:
            found.ties += 1
            continue
        better, worse = (i, j) if a > b else (j, i)
        more = {"score_chosen": max(a, b), "score_rejected": min(a, b)}
        if choice.margin:
            more["margin"] = abs(a - b)
        found.rows.append(labels.pair_row(asked, asked.responses[better], asked.responses[worse], more))


def lines_of(found: Judged, source: Any) -> Iterator[str]:
    """What was judged and what it took, for people."""
    yield (f"{len(found.rows)} pairs kept of {found.compared} that {source.name} judged, of {found.prompts} prompts; "
           f"{found.ties} ties, {found.failures} without a verdict")
    if found.ordered:
        yield (f"{found.changed} of {found.ordered} verdicts ({found.changed / found.ordered:.1%}) changed with the "
               "order of the two responses")
        if found.changed > MANY_CHANGED * found.ordered:
            yield ("warning: so many verdicts follow the order and not the responses; measure this judge by "
                   "--evaluate.labels before anything is trained on it")
    if isinstance(source, JudgeSource):
        spent, counts = source.budget, source.asker.counts
        cost = f", cost {spent.cost:.4g}" if spent.cost else ""
        yield (f"{spent.calls} calls to the judge ({counts.cached} of {counts.questions} questions were answered "
               f"before), {spent.num_input:,} tokens read, {spent.num_output:,} written{cost}")
