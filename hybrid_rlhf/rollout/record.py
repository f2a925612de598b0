"""Sampled responses with log-probabilities, scores and advantages."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hybrid_rlhf.core.distributed import gather_over_ranks, max_over_ranks, sum_over_ranks
from hybrid_rlhf.core.errors import present
from hybrid_rlhf.core.image_files import ImageRef
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.tensors import KeptSets, SequenceBatch, length_mask, masked_sum, pad_right, to_device
from hybrid_rlhf.rollout.episode_record import Episode, measure, readable

_LATER: Any = None  # default of fields that are filled in after sampling and not read before
_SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+|\n+")


@dataclass
class Prompts:
    """B prompts, as an on-policy loader yields them.

    ids: token ids with the template's generation marker; texts: the same as text; columns: every other column of the
    rows, one list of B values each, passed to reward functions. images: those of each prompt, in the order of their
    tokens (none if not given).
    """

    ids: list[list[int]]
    texts: list[str]
    columns: dict[str, list] = field(default_factory=dict)
    images: list[tuple[ImageRef, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.images = self.images or [()] * len(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def given(self) -> list[str | list[dict]]:
        """The prompts as their rows have them: messages or text; the model's text where no column has them."""
        return self.columns.get("prompt") or list(self.texts)

    @property
    def asked(self) -> list[tuple]:
        """What tells prompts apart: the tokens and the images of each."""
        return list(zip(self.ids, self.images, strict=True))

    def __add__(self, other: Prompts) -> Prompts:
        """The prompts of both, these first; a column that one of them lacks is None there, or no images."""

        def column(part: Prompts, name: str) -> list:
            lacking = part.images if name == "images" else [None] * len(part)
            return part.columns.get(name, lacking)

        return Prompts(self.ids + other.ids, self.texts + other.texts,
                       {name: column(self, name) + column(other, name) for name in self.columns | other.columns},
                       self.images + other.images)

    def repeat(self, num_samples: int) -> Prompts:
        """Each prompt `num_samples` times in a row, so that the samples of one prompt (a group) are contiguous."""

        def each(values: Sequence) -> list:
            return [v for v in values for _ in range(num_samples)]

        return Prompts(each(self.ids), each(self.texts), {k: each(v) for k, v in self.columns.items()},
                       each(self.images))

    def rows(self, index: Sequence[int]) -> Prompts:
        """The prompts `index`, in that order."""
        return Prompts([self.ids[i] for i in index], [self.texts[i] for i in index],
                       {k: [v[i] for i in index] for k, v in self.columns.items()},
                       [self.images[i] for i in index])


class Totals(NamedTuple):
    """Counts of a minibatch over all processes. Losses are divided by them, so that no split changes the gradient."""

    num_actions: Tensor
    num_sequences: Tensor


@dataclass
class Rollout:
    """B sampled sequences and all that PPO needs of them. R is the length of the longest response.

    response_ids (B, R), right-padded: everything after the prompt. response_mask (B, R) bool: its real tokens.
    action_mask (B, R) bool: the tokens that the policy sampled, the end of each turn included; it has holes where a
    tool or an environment wrote. has_eos (B,) bool: whether the response ended by itself. The rest is filled in by
    `collect` and the trainer; shapes as in the glossary: logprobs, ref_logprobs, values, rewards, advantages, returns
    (B, R); scores (B,), NaN where a method that allows it has none. source_scores: (B,) of each reward source, NaN
    where it skipped a response. source_weights: the weight of each of several sources in the scores.
    is_clipped (B,) bool: whether the score was clipped on stage 2's scale.
    shaped_scores (B,): the reward of each response without the KL penalty. numbers: (B,) the index of each sequence
    among those of all processes, where that is not the order of processes. temperature: the divisor of the logits in
    sampling, scoring and training, so that all log-probabilities are those of the policy that sampled. episodes: the
    episode of each response, where it has several turns. token_scores (B, R): the part of the scores that belongs to
    single tokens, such as the end of a turn (None: the scores are of whole responses). step_ends (B, R) bool: those
    tokens, each the last one of a step or a turn, whether its score is 0 or not. remarks: a judge's reason for each
    response, if any. kept: the candidate tokens of each action, where sampling was truncated and that is replayed: all
    log-probabilities are then normalised over them. teacher: a teacher's targets for the actions
    (algorithms/divergence.TeacherTargets), with the same rows.
    """

    prompts: Prompts
    response_ids: Tensor
    response_mask: Tensor
    action_mask: Tensor
    has_eos: Tensor
    completions: list[str] = field(default_factory=list)
    sampled_logprobs: Tensor = _LATER
    logprobs: Tensor = _LATER
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor = _LATER
    source_scores: dict[str, Tensor] = field(default_factory=dict)
    source_weights: dict[str, float] = field(default_factory=dict)
    is_clipped: Tensor | None = None
    shaped_scores: Tensor = _LATER
    rewards: Tensor = _LATER
    advantages: Tensor = _LATER
    returns: Tensor = _LATER
    numbers: Tensor | None = None
    temperature: float = 1.0
    episodes: list[Episode] = field(default_factory=list)
    token_scores: Tensor | None = None
    step_ends: Tensor | None = None
    remarks: list[str] = field(default_factory=list)
    kept: KeptSets | None = None
    teacher: Any = None
    _places: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def from_responses(cls, prompts: Prompts, responses: Sequence[Sequence[int]], has_eos: Sequence[bool],
                       pad_id: int, completions: list[str],
                       is_sampled: Sequence[Sequence[bool]] | None = None, temperature: float = 1.0) -> Rollout:
        """Build the record from token lists; the masks come from lengths. An empty response is not allowed.

        is_sampled: which tokens of each response the policy sampled (None: all). temperature: of the sampling.
        """
        mask = length_mask(torch.tensor([len(r) for r in responses]))
        actions = mask if is_sampled is None else pad_right(is_sampled, False, torch.bool)
        return cls(prompts, pad_right(responses, pad_id), mask, actions, torch.tensor(has_eos, dtype=torch.bool),
                   completions, temperature=temperature)

    def __len__(self) -> int:
        return self.response_ids.shape[0]

    def shown(self, i: int) -> str:
        """Response i for people: its text, or all messages of the episode."""
        return readable(self.episodes[i].messages) if self.episodes else self.completions[i]

    def responses(self) -> list[str | list[dict]]:
        """Each response as its text, or as the messages of its episode."""
        return [episode.messages for episode in self.episodes] if self.episodes else list(self.completions)

    @property
    def episode_rewards(self) -> list[float | None]:
        """The total reward of each episode from its environment."""
        return [episode.total_reward for episode in self.episodes]

    def turn_rewards(self) -> Tensor:
        """(B, R): the reward of each turn of an episode, at its last token."""
        placed = torch.zeros(self.action_mask.shape)
        for i, place, reward in self._rewarded_turns():
            placed[i, place] = reward
        return placed

    def rewarded_turn_ends(self) -> Tensor:
        """(B, R) bool: the last token of each turn with a reward of its own, 0 included."""
        ends = torch.zeros_like(self.action_mask)
        for i, place, _ in self._rewarded_turns():
            ends[i, place] = True
        return ends

    def _rewarded_turns(self) -> Iterator[tuple[int, int, float]]:
        """(row, column, reward)"""
        for i, episode in enumerate(self.episodes):
            for end, reward in zip(episode.turn_ends, episode.turn_rewards, strict=False):  # may be empty
                yield i, end - 1, reward

    def of_actions(self, values: Tensor) -> Tensor:
        """`values` (B, R), on this rollout's device, at the actions alone: (N,), row by row."""
        return values.flatten().index_select(0, self._action_places())

    def owners(self) -> Tensor:
        """(N,) long: the row of each action."""
        return self._action_places().div(max(1, self.action_mask.shape[1]), rounding_mode="floor")

    def _action_places(self) -> Tensor:
        """(N,) long: indices of the actions in a flat (B * R). Computed before it moves to a device, where nonzero()
        would make the host wait."""
        return self.action_mask.flatten().nonzero()[:, 0] if self._places is None else self._places

    def sequences(self, pad_id: int) -> SequenceBatch:
        """Prompts and responses as right-padded sequences (B, T) whose loss_mask marks the actions."""
        lengths = self.response_mask.sum(1).tolist()
        rows, marks = [], []
        for prompt, n, ids, actions in zip(self.prompts.ids, lengths, self.response_ids.tolist(),
                                           self.action_mask.tolist(), strict=True):
            rows.append(prompt + ids[:n])
            marks.append([False] * len(prompt) + actions[:n])
        mask = length_mask(torch.tensor([len(row) for row in rows]))
        return SequenceBatch(pad_right(rows, pad_id), mask, pad_right(marks, False, torch.bool), kept=self.kept,
                             images=self.prompts.images if any(self.prompts.images) else None)

    def rows(self, index: Tensor) -> Rollout:
        """The sequences `index` (a long tensor), in that order."""
        chosen = index.tolist()
        prompts = self.prompts.rows(chosen)
        part: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.init and f.name != "prompts"}
        for name in ("completions", "episodes", "remarks"):
            part[name] = [part[name][i] for i in chosen] if part[name] else []
        part["teacher"] = self.teacher and self.teacher.select(index)
        part["source_scores"] = {k: v[index] for k, v in self.source_scores.items()}
        part["kept"] = None if self.kept is None else self.kept.rows(index)
        part = {k: v[index] if isinstance(v, Tensor) else v for k, v in part.items()}
        return Rollout(prompts, **part)

    def __add__(self, other: Rollout) -> Rollout:
        """The sequences of both, these first, padded to the longer of the two widths (with 0, which is masked).
        Raises ValueError for rollouts of different temperatures."""
        if self.temperature != other.temperature:
            raise ValueError(f"rollouts sampled at temperatures {self.temperature} and {other.temperature}")
        width = max(self.response_ids.shape[1], other.response_ids.shape[1])

        def joined(a: Any, b: Any) -> Any:
            if isinstance(a, dict):
                return {key: joined(value, b[key]) for key, value in a.items()}
            if a is None or isinstance(a, (int, float)):
                return a
            if not isinstance(a, Tensor):
                return a + b
            return torch.cat([x if x.ndim == 1 else pad(x, (0, width - x.shape[1])) for x in (a, b)])

        return Rollout(self.prompts + other.prompts, **{f.name: joined(getattr(self, f.name), getattr(other, f.name))
                                                        for f in fields(self) if f.init and f.name != "prompts"})

    def has_reward_variance(self, group_size: int) -> Tensor:
        """(groups,) bool: whether the rewards of a prompt's scored responses differ. Groups are contiguous rows."""
        grouped, is_skipped = (x.view(-1, group_size) for x in (self.shaped_scores, self.shaped_scores.isnan()))
        return grouped.masked_fill(is_skipped, -torch.inf).amax(1) > grouped.masked_fill(is_skipped, torch.inf).amin(1)

    def objectives(self) -> list[tuple[Tensor, float]]:
        """The scores (B,) and the weight of each of several reward sources; a judge's items count within the judge."""
        names = [n for n in self.source_weights if not any(n.startswith(f"{other}/") for other in self.source_weights)]
        return [(self.source_scores[n], self.source_weights[n]) for n in names]

    def without_truncated(self) -> Rollout:
        """The same sequences, those that did not end by themselves without an action: no loss has a part of them, and a
        mean over sequences counts them."""
        kept = self.kept and KeptSets(*([x if ended else x[:0] for x, ended in zip(
            part, self.has_eos.tolist(), strict=True)] for part in (self.kept.ids, self.kept.sizes)))
        return replace(self, action_mask=self.action_mask & self.has_eos[:, None], kept=kept)

    def scored(self) -> Rollout:
        """The responses that have a score, renumbered over all processes; self if all have one. Every process calls
        it."""
        is_scored = ~self.scores.isnan()
        if not max_over_ranks(int(not is_scored.all())):
            return self
        scored = self.rows(is_scored.nonzero()[:, 0])
        if scored.numbers is not None:
            numbers = sorted(n for part in gather_over_ranks(scored.numbers.tolist()) for n in part)
            scored.numbers = torch.searchsorted(torch.tensor(numbers, dtype=torch.long), scored.numbers)
        return scored

    def to(self, device: torch.device | str) -> Rollout:
        part = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        tensors: dict[str, Any] = {k: to_device(v, device) for k, v in part.items() if isinstance(v, Tensor)}
        moved = replace(self, **tensors)
        moved._places = to_device(self._action_places(), device)
        return moved

    def shuffled(self, size: int, generator: torch.Generator, first: int = 0, total: int | None = None,
                 ) -> Iterator[Rollout]:
        """Pieces of at most `size` sequences in an order drawn from `generator`.

        total: sequences of all processes, of which these have the numbers first, first + 1, ... (or `numbers`). `size`
        then counts those of all processes, and a piece has this process's share, which may be empty: every process
        yields as many pieces.
        """
        order = torch.randperm(len(self) if total is None else total, generator=generator)
        rows = torch.full((len(order),), -1)  # number -> row of this process, or -1
        rows[first + torch.arange(len(self)) if self.numbers is None else self.numbers] = torch.arange(len(self))
        for piece in order.split(size):
            yield self.rows(rows[piece][rows[piece] >= 0])

    def totals(self) -> Totals:
        """The divisors of a minibatch's losses, 1 at least: it may have no action. Every process calls it."""
        counts = sum_over_ranks(torch.stack([self.action_mask.sum(), torch.tensor(len(self))]))
        return Totals(*counts.clamp(min=1).unbind())

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompts, each counted with each of its responses, and of the actions."""
        return sum(map(len, self.prompts.ids)) + int(self.action_mask.sum())

    def mean_kl(self) -> float:
        """Mean over sequences of sum_t (logprobs - ref_logprobs), in nats: the estimate of KL(actor || ref)."""
        difference = self.logprobs - present(self.ref_logprobs, "ref_logprobs")
        return float(masked_sum(difference, self.action_mask) / max(len(self), 1))

    def _add_variety(self, metrics: Metrics) -> None:
        """Diversity of the responses: distinct-2 of tokens (1510.03055), distinct answers over prompts (repetition in
        a prompt's own samples does not count), share of the top 3, and of the commonest last sentence. Shares fall with
        the number of responses."""
        ids, both = self.response_ids.tolist(), self.action_mask[:, 1:] & self.action_mask[:, :-1]
        pairs = (f"{row[t]} {row[t + 1]}" for row, where in zip(ids, both, strict=True) for t in where.nonzero()[:, 0])
        metrics.add_items("completions/distinct_2", pairs, "distinct")
        texts = [text.strip() for text in self.completions]
        asked = (hashlib.sha256(str(key).encode()).hexdigest()[:16] for key in self.prompts.asked)  # short: it is sent
        metrics.add_grouped("completions/distinct_answers", zip(asked, texts, strict=False))  # may be empty
        metrics.add_items("completions/top3_share", texts, "top3")
        metrics.add_items("completions/same_ending", (_SENTENCE_ENDS.split(text)[-1] for text in texts if text), "top1")

    def metrics(self) -> Metrics:
        """The metrics of the samples of every on-policy method (names follow TRL)."""
        metrics, size = Metrics(), len(self)
        lengths = self.action_mask.sum(1).float()
        scored = self.scores[~torch.isnan(self.scores)]
        metrics.add("reward", scored.mean(), len(scored))
        metrics.add_spread("reward_std", scored, "std")
        for name, scores in self.source_scores.items():  # NaN: skipped
            known = scores[~torch.isnan(scores)]
            metrics.add(f"rewards/{name}/mean", known.mean(), len(known))
            metrics.add_spread(f"rewards/{name}/std", known, "std")
            if self.source_weights.get(name) == 0:  # for an alarm about a second reward
                metrics.add_spread(f"rewards/{name}/max", known, "max")
                metrics.add(f"rewards/{name}/correlation", *_correlation(scores, self.scores))
        if self.is_clipped is not None:
            metrics.add("score/clip_fraction", self.is_clipped.float().mean(), size)
        metrics.add("completions/mean_length", lengths.mean(), size)
        metrics.add_spread("completions/min_length", lengths, "min")
        metrics.add_spread("completions/max_length", lengths, "max")
        ended = lengths[self.has_eos]
        metrics.add("completions/mean_terminated_length", ended.mean(), len(ended))
        metrics.add_spread("completions/min_terminated_length", ended, "min")
        metrics.add_spread("completions/max_terminated_length", ended, "max")
        metrics.add("completions/clipped_ratio", (~self.has_eos).float().mean(), size)
        if self.source_scores:
            metrics.add("completions/unscored_ratio", 1 - len(scored) / max(size, 1), size)
        if self.completions:
            metrics.add("completions/empty_ratio", sum(not text.strip() for text in self.completions) / size, size)
        self._add_variety(metrics)
        if self.episodes:
            metrics = metrics + measure(self.episodes)
        if self.ref_logprobs is not None:
            metrics.add("kl", self.mean_kl(), size)
            metrics.add("objective/kl", self.mean_kl(), size)
        return metrics.add("objective/score", scored.mean(), len(scored))


def _correlation(first: Tensor, second: Tensor) -> tuple[float, int]:
    """Pearson correlation over the responses (B,) that have both, and their number; (0, 0) if one is constant."""
    both = torch.stack([first, second]).double()
    both = both[:, ~both.isnan().any(0)]
    spread = both.std(1, correction=0)
    if both.shape[1] < 2 or not bool((spread > 1e-9 * both.abs().amax(1)).all()):
        return 0.0, 0
    centred = both - both.mean(1, keepdim=True)
    return float(centred.prod(0).mean() / spread.prod()), both.shape[1]
