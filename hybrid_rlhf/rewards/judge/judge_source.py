"""A judge as a reward source: grades, comparisons and rankings of responses by a rubric."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TypeVar

import torch

from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.data.chat import Text
from hybrid_rlhf.data.row_images import sources_in
from hybrid_rlhf.data.turns import readable
from hybrid_rlhf.rewards import BadAnswer
from hybrid_rlhf.rewards.judge.api_backend import ApiBackend
from hybrid_rlhf.rewards.judge.asking import AnswerCache, Asker, Backend, Budget, Counts, Failure, Question
from hybrid_rlhf.rewards.judge.judge_config import (
    ABSOLUTE,
    BASE,
    MAX_TOGETHER,
    PAIRWISE,
    PROBABILITY,
    RANKING,
    JudgeConfig,
)
from hybrid_rlhf.rewards.judge.judge_prompts import (
    LETTERS,
    YES_NO,
    Item,
    Prompter,
    Rubric,
    open_prompts,
    shown,
)
from hybrid_rlhf.rewards.judge.local_backend import LocalBackend
from hybrid_rlhf.rewards.judge.verdicts import Grade, Preference, read_better, read_grade, read_ranking
from hybrid_rlhf.rollout import Rollout

T = TypeVar("T")
Judged = tuple[list[float | None], list[str]]  # a score and a remark for each response
YES, NO = "Yes", "No"
NUMBERS = tuple(map(str, range(11)))
LITTLE_MASS = 0.5  # total probability of the candidate words: below it the judge mostly wants another one


@dataclass
class JudgeSource:
    """Scores in [0, 1] by a judge, in one of the modes of JudgeConfig.

    `compare` and `grade` take any responses; `score` takes a rollout, in which relative modes need several responses to
    a prompt. A response without a verdict is counted and handled by config.on_failure.
    """

    asker: Asker
    prompter: Prompter
    config: JudgeConfig
    budget: Budget
    name: str = "judge"
    last_failure: str = field(default="", init=False, repr=False)  # the reason of the last missing verdict
    _is_reward: bool = field(default=False, repr=False)  # on_failure concerns rewards, not labels
    _seen: Metrics = field(default_factory=Metrics, repr=False)  # since the last report
    _has_warned_mass: bool = field(default=False, repr=False)
    _has_warned_images: bool = field(default=False, repr=False)

    @property
    def rubric(self) -> Rubric:
        return self.prompter.rubric

    def open(self) -> None:
        """Load the model of a local judge."""
        self.asker.backend.open()

    def score(self, rollout: Rollout) -> list[float | None]:
        """The score of each response; in absolute mode also that of each item, as rollout.source_scores NAME/ITEM. The
        judge's reasons go to rollout.remarks."""
        if not len(rollout):
            return []
        self._is_reward = True
        prompts = self._readable(rollout.prompts.given)
        responses = rollout.responses()
        groups = groups_of(rollout)
        if self.config.mode == ABSOLUTE:
            grades = self.grade(prompts, responses)
            for item in self.rubric.items:
                rollout.source_scores[f"{self.name}/{item.name}"] = torch.tensor(
                    [float("nan") if grade is None else grade.items[item.name] for grade in grades])
                rollout.source_weights[f"{self.name}/{item.name}"] = item.weight
            scores = [None if grade is None else grade.score for grade in grades]
            rollout.remarks = ["" if grade is None else grade.reason for grade in grades]
        else:
            smallest = min(map(len, groups))
            check(smallest > 1, f"reward.judge.mode is {self.config.mode}, and a prompt has one response; sample "
                                "several (num_samples), or choose absolute")
            relative = self._ranked if self.config.mode == RANKING else self._matched
            scores, rollout.remarks = relative(groups, prompts, responses)
        self._seen.add("judge/failed", scores.count(None) / len(scores), len(scores))
        return self._filled(scores, groups)

    def grade(self, prompts: Sequence[Text], completions: Sequence[Text]) -> list[Grade | None]:
        """A grade for each response by itself; None where there is no readable reply."""
        check(self.config.mode == ABSOLUTE, f"reward.judge.mode {self.config.mode} compares responses and grades none; "
                                            "choose absolute")
        if self.config.score == PROBABILITY:
            return self._grade_by_words(prompts, completions)
        results = self.asker.verdicts([
            Question(self.prompter.chat(prompt, [each]), lambda reply: read_grade(reply, self.rubric))
            for prompt, each in zip(prompts, completions, strict=True)])
        return [self._or_none(each) for each in results]

    def compare(self, prompts: Sequence[Text], first: Sequence[Text], second: Sequence[Text]) -> list[Preference]:
        """Which of two responses to each prompt is better, shown in both orders. Mode absolute grades each by itself,
        without any order. Identical responses are a tie without a question."""
        unlike = [i for i in range(len(prompts)) if shown(first[i]) != shown(second[i])]
        ways = {ABSOLUTE: self._compare_grades, PAIRWISE: self._compare_pairs, RANKING: self._compare_ranks}
        some = [[values[i] for i in unlike] for values in (prompts, first, second)]
        preferences = [Preference((0.5, 0.5))] * len(prompts)
        for i, preference in zip(unlike, ways[self.config.mode](*some), strict=True):
            preferences[i] = preference
            if preference.is_consistent is not None and self.config.mode != ABSOLUTE:
                self._seen.add("judge/order_changed", not preference.is_consistent)
        return preferences

    def report(self, metrics: Metrics) -> None:
        """Add the metrics judge/... of the questions since the last report."""
        counts = self.asker.counts
        if counts.questions:
            metrics.add("judge/cached", counts.cached / counts.questions, counts.questions)
            metrics.add("judge/asked_again", counts.again / counts.questions, counts.questions)
        metrics.take(self._seen).add("judge/calls", self.budget.calls)
        if self.budget.cost:
            metrics.add("judge/cost", self.budget.cost)
        self.asker.counts, self._seen = Counts(), Metrics()

    def _readable(self, prompts: Sequence[Text]) -> Sequence[Text]:
        """The prompts as the judge reads them; of one that reads no images, which one line says, with [image]."""
        if not any(sources_in(prompt) for prompt in prompts if not isinstance(prompt, str)):
            return prompts
        self.open()
        if self.asker.backend.reads_images:
            return prompts
        if not self._has_warned_images:
            self._has_warned_images = True
            cure = "reward.judge.images true sends them" if self.config.url else f"{self.config.model} reads no images"
            print(f"judge: it reads [image] in place of the images of prompts; {cure}", file=sys.stderr)
        return list(map(readable, prompts))

    # -- absolute ------------------------------------------------------------------------------------------------------

    def _grade_by_words(self, prompts: Sequence[Text], completions: Sequence[Text]) -> list[Grade | None]:
        items = self.rubric.items
        chats = [self.prompter.chat(prompt, [each], [item]) for prompt, each in zip(prompts, completions, strict=True)
                 for item in items]
        probabilities = self.asker.probabilities(chats, [words_of(item) for item in items] * len(completions))
        grades = [self._grade_of(probabilities[i * len(items) : (i + 1) * len(items)]) for i in range(len(completions))]
        self._warn_mass([grade.mass for grade in grades if grade is not None])
        return grades

    def _grade_of(self, probabilities: Sequence[list[float] | Failure]) -> Grade | None:
        values, masses = {}, []
        for item, each in zip(self.rubric.items, probabilities, strict=True):
            if isinstance(each, Failure):
                self._warn(each)
                return None
            values[item.name] = expected(item, each)
            masses.append(sum(each))
        self._seen.add("judge/word_mass", min(masses))
        return Grade(self.rubric.score(values), values, mass=min(masses))

    def _compare_grades(self, prompts: Sequence[Text], first: Sequence[Text], second: Sequence[Text]
                        ) -> list[Preference]:
        grades = self.grade([*prompts, *prompts], [*first, *second])
        return [Preference((None, None), failure="the judge gave no grade") if a is None or b is None else
                Preference((_sign(a.score, b.score),) * 2, (a.reason, b.reason))
                for a, b in zip(grades[: len(prompts)], grades[len(prompts) :], strict=True)]

    # -- two at a time -------------------------------------------------------------------------------------------------

    def _compare_pairs(self, prompts: Sequence[Text], first: Sequence[Text], second: Sequence[Text]
                       ) -> list[Preference]:
        rows = list(zip(prompts, first, second, strict=True))
        chats = [self.prompter.chat(p, pair) for p, a, b in rows for pair in ((a, b), (b, a))]
        if self.config.score == PROBABILITY:
            probabilities = self.asker.probabilities(chats, [("A", "B")] * len(chats))
            verdicts = [each if isinstance(each, Failure) else self._share_of_a(each) for each in probabilities]
            self._warn_mass([sum(each) for each in probabilities if not isinstance(each, Failure)])
        else:
            verdicts = self.asker.verdicts([Question(chat, read_better) for chat in chats])
        return [self._preference(verdicts[2 * i], verdicts[2 * i + 1]) for i in range(len(rows))]

    def _share_of_a(self, probabilities: list[float]) -> tuple[float, str]:
        self._seen.add("judge/word_mass", sum(probabilities))
        return probabilities[0] / sum(probabilities), ""

    def _preference(self, straight: tuple[float, str] | Failure, swapped: tuple[float, str] | Failure) -> Preference:
        """Combine the verdicts of both orders: (first, second), and (second, first)."""
        failed = next((each for each in (straight, swapped) if isinstance(each, Failure)), None)
        if failed:
            self._warn(failed)
        one = (None, "") if isinstance(straight, Failure) else straight
        other = (None, "") if isinstance(swapped, Failure) else (1 - swapped[0], swapped[1])
        return Preference((one[0], other[0]), (one[1], other[1]), failed.what if failed else None)

    def _matched(self, groups: list[list[int]], prompts: Sequence[Text], responses: Sequence[Text]) -> Judged:
        """Each response's share of wins against others of its group, and the remark of its first comparison."""
        pairs = [pair for group in groups for pair in self._pairs(group, responses)]
        preferences = self.compare([prompts[i] for i, _ in pairs], [responses[i] for i, _ in pairs],
                                   [responses[j] for _, j in pairs])
        wins: dict[int, list[float]] = {}
        remarks = [""] * len(responses)
        for (i, j), preference in zip(pairs, preferences, strict=True):
            if preference.share is not None:
                wins.setdefault(i, []).append(preference.share)
                wins.setdefault(j, []).append(1 - preference.share)
            for k, letter in ((i, "A"), (j, "B")):
                remarks[k] = remarks[k] or _remark(letter, preference.reasons[0])
        return [fmean(wins[i]) if i in wins else None for i in range(len(responses))], remarks

    def _pairs(self, group: list[int], responses: Sequence[Text]) -> list[tuple[int, int]]:
        """The pairs to compare: all, or each with the next ones on a circle in a seeded order, so that every response
        meets at least config.opponents others."""
        size = len(group)
        if self.config.opponents is None or self.config.opponents >= size - 1:
            return [(group[a], group[b]) for a in range(size) for b in range(a + 1, size)]
        circle = self._shuffled(group, responses)
        pairs: dict[frozenset[int], tuple[int, int]] = {}
        for step in range(1, -(-self.config.opponents // 2) + 1):
            for at, i in enumerate(circle):
                j = circle[(at + step) % size]
                pairs.setdefault(frozenset((i, j)), (i, j))
        return list(pairs.values())

    # -- a group together ----------------------------------------------------------------------------------------------

    def _ranked(self, groups: list[list[int]], prompts: Sequence[Text], responses: Sequence[Text]) -> Judged:
        """Each response's relative score, its whole group shown in a seeded order, and the remark on the group."""
        largest = max(map(len, groups))
        check(largest <= MAX_TOGETHER, f"reward.judge.mode ranking shows {MAX_TOGETHER} responses together at most, "
                                       f"and a prompt has {largest}; lower num_samples, or choose pairwise")
        orders = [self._shuffled(group, responses) for group in groups]
        rankings = self._ask_ranks([prompts[order[0]] for order in orders],
                                   [[responses[i] for i in order] for order in orders])
        scores: list[float | None] = [None] * len(responses)
        remarks = [""] * len(responses)
        for order, each in zip(orders, rankings, strict=True):
            if each is not None:
                for i, value, letter in zip(order, each[0], LETTERS, strict=False):
                    scores[i], remarks[i] = value, _remark(letter, each[1])
        return scores, remarks

    def _ask_ranks(self, prompts: Sequence[Text], groups: Sequence[Sequence[Text]]
                   ) -> list[tuple[list[float], str] | None]:
        questions = [Question(self.prompter.chat(prompt, group), partial(read_ranking, letters=LETTERS[: len(group)]))
                     for prompt, group in zip(prompts, groups, strict=True)]
        return [self._or_none(each) for each in self.asker.verdicts(questions)]

    def _compare_ranks(self, prompts: Sequence[Text], first: Sequence[Text], second: Sequence[Text]
                       ) -> list[Preference]:
        pairs = list(zip(first, second, strict=True))
        rankings = self._ask_ranks([p for p in prompts for _ in range(2)],
                                   [order for a, b in pairs for order in ((a, b), (b, a))])
        sides = [None if each is None else (_sign(*each[0]), each[1]) for each in rankings]
        unread = Failure("the judge's reply cannot be read")
        return [self._preference(sides[2 * i] or unread, sides[2 * i + 1] or unread) for i in range(len(pairs))]

    # -- all modes -----------------------------------------------------------------------------------------------------

    def _shuffled(self, group: list[int], responses: Sequence[Text]) -> list[int]:
        """The group in an order drawn from its responses and the seed: the same group gives the same question."""
        content = "\0".join(shown(responses[i]) for i in group).encode("utf-8", "backslashreplace")
        seed = int.from_bytes(hashlib.sha256(content).digest()[:8], "big") ^ self.asker.seed
        order = list(group)
        random.Random(seed).shuffle(order)
        return order

    def _or_none(self, result: T | Failure) -> T | None:
        if isinstance(result, Failure):
            self._warn(result)
            return None
        return result

    def _warn(self, failure: Failure) -> None:
        """Print one line the first time; the metric judge/failed counts all."""
        if not self.last_failure:
            fate = (f"{_FATE[self.config.on_failure]} (reward.judge.on_failure; metric judge/failed)"
                    if self._is_reward else "such a one is left out and counted")
            print(f"judge: a response has no verdict ({failure.what}); {fate}", file=sys.stderr)
        self.last_failure = failure.what

    def _warn_mass(self, masses: Sequence[float]) -> None:
        """Print one line the first time that the candidate words are unlikely; the metric judge/word_mass has all."""
        if masses and fmean(masses) < LITTLE_MASS and not self._has_warned_mass:
            self._has_warned_mass = True
            print(f"judge: the words that it may answer with have a probability of {fmean(masses):.2g} together, on "
                  "average: it wants to say something else (a thought?), and their ratio means little; take another "
                  "judge or template, or reward.judge.score verdict (metric judge/word_mass)", file=sys.stderr)

    def _filled(self, scores: list[float | None], groups: list[list[int]]) -> list[float | None]:
        """The scores, the missing ones filled as on_failure says."""
        known = [value for value in scores if value is not None]
        if len(known) == len(scores) or self.config.on_failure == "skip":
            return scores
        if not known or self.config.on_failure == "stop":
            raise BadAnswer(f"reward source {self.name} at {self.asker.backend.name}: {len(scores) - len(known)} of "
                            f"{len(scores)} responses have no verdict (the last: {self.last_failure}); take a judge or "
                            "a rubric that it answers (reward.judge.score probability needs one word of it), then run "
                            "the same command again")
        filled = list(scores)
        for group in groups:
            peers = [value for i in group if (value := scores[i]) is not None]
            for i in group:
                if scores[i] is None:
                    filled[i] = fmean(peers or known)
        return filled


_FATE = {"mean": "such a one gets the mean score of the others of its prompt, or else of all",
         "skip": "such a one has no score of the judge", "stop": "the run ends there"}


def open_judge(config: JudgeConfig, seed: int = 0, base: str | None = None) -> JudgeSource:
    """The judge of the settings. UserError for an unusable rubric, template, address or model; reads no weights before
    `open`. base: the folder of the policy's own start, where config.model is computed on the policy's weights."""
    check(config.is_given, "no judge: give reward.judge.model or reward.judge.url")
    check(config.model != BASE or base is not None,
          f"reward.judge.model is {BASE}, the model that the policy starts from, and there is none here; give a folder "
          f"(./{BASE}, if that is its name)")
    prompter = open_prompts(config)
    is_graded = (config.mode, config.score) == (ABSOLUTE, PROBABILITY)
    check(not (config.url and is_graded and any(item.kind != YES_NO for item in prompter.rubric.items)),
          "reward.judge.score is probability, and an address tells the probability of one token, which 10 need not be; "
          "make every item of the rubric yes_no, or take reward.judge.model")
    budget = Budget(config.max_calls, config.max_cost, config.cost_per_1m_input, config.cost_per_1m_output)
    backend: Backend
    if config.url:
        backend = ApiBackend(config.url, config.api_model, budget, config.api_key_env, config.api_options,
                             config.temperature, config.concurrency, config.timeout, config.http_retries,
                             reads_images=config.images)
    else:
        backend = LocalBackend(base or str(config.model), budget, config.dtype, config.load_in_4bit,
                               config.temperature, config.batch_size, is_shared=base is not None,
                               adapter=config.model if base is not None and config.model != BASE else None)
    asker = Asker(backend, AnswerCache(config.cache), config.max_new_tokens, config.retries, seed)
    return JudgeSource(asker, prompter, config, budget)


def groups_of(rollout: Rollout) -> list[list[int]]:
    """Contiguous rows of one prompt. The samples of a prompt share its token ids as one object or, if an environment
    writes them, as equal lists."""
    ids, images, groups = rollout.prompts.ids, rollout.prompts.images, [[0]]
    for i in range(1, len(rollout)):
        is_same = ids[i] is ids[i - 1] or (
            bool(rollout.episodes) and ids[i] == ids[i - 1] and images[i] == images[i - 1])
        if is_same:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def words_of(item: Item) -> tuple[str, ...]:
    """The words whose probabilities answer an item."""
    return (YES, NO) if item.kind == YES_NO else NUMBERS


def expected(item: Item, probabilities: Iterable[float]) -> float:
    """The mean of an item's value in [0, 1] under the probabilities of its words, made to sum to 1."""
    weights = list(probabilities)
    values = (1.0, 0.0) if item.kind == YES_NO else [n / 10 for n in range(11)]
    return sum(p * v for p, v in zip(weights, values, strict=True)) / sum(weights)


def _remark(letter: str, reason: str) -> str:
    """A judge's reason, for the response that it saw under this letter."""
    return f"(as {letter}) {reason}" if reason else ""


def _sign(first: float, second: float) -> float:
    return 1.0 if first > second else 0.0 if first < second else 0.5
