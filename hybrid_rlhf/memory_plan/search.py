"""Finds settings that fit a given memory: tries changes, the cheapest first, and says what was chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hybrid_rlhf.core.options import value_of, with_value
from hybrid_rlhf.engine.train.zero_config import OFFLOADS
from hybrid_rlhf.memory_plan.plan import Plan

MIN_TOKENS = 256  # micro-batches are not made smaller than this


@dataclass(frozen=True)
class Change:
    """One setting that differs from the one before, and why."""

    option: str
    before: str
    chosen: str
    why: str

    @property
    def flag(self) -> str:
        return f"--{self.option} {self.chosen}"


@dataclass(frozen=True)
class SearchResult:
    """Settings that fit, or the smallest that were tried; changes: what differs from the given ones."""

    config: object
    plans: list[Plan]
    changes: tuple[Change, ...] = ()

    @property
    def fits(self) -> bool:
        return all(p.short <= 0 for p in self.plans)

    @property
    def flags(self) -> list[str]:
        return [change.flag for change in self.changes]

    @property
    def peak(self) -> int:
        return max(p.peak for p in self.plans)


Candidate = tuple[object, tuple[Change, ...]]
Setting = tuple[str, object, str]  # an option, its new value, and why


def choose(config: object, plans_of: Callable[..., list[Plan]], *, has_host: bool) -> SearchResult:
    """The first of the candidates that fits; else the smallest one tried. plans_of(config, is_exact=) counts.

    has_host: whether the CPU's memory is separate from the device's.
    """
    best: SearchResult | None = None
    for options in candidates(config, has_host=has_host):
        smallest = SearchResult(options[-1][0], plans_of(options[-1][0], is_exact=False), options[-1][1])
        best = smallest if best is None or smallest.peak < best.peak else best
        for changed, changes in options if smallest.fits else []:
            if all(p.short <= 0 for p in plans_of(changed, is_exact=False)):
                tried = SearchResult(changed, plans_of(changed), changes)
                if tried.fits:
                    return tried
    return best


def candidates(config: object, *, has_host: bool) -> Iterator[list[Candidate]]:
    """Settings with the changes that made them, in lists that go from the given micro-batch to the smallest.

    Smaller micro-batches cost little and change no gradient, so they come first; then checkpointing (a third more
    time); then, where there is a host to offload to, idle roles, the optimizer and activations (transfers, the same
    numbers); then a quantised base, where it is frozen: that one changes what is computed. Last comes ZeRO 3 with its
    parameters on the host, by far the slowest.
    """
    counts = [config.engine.micro_batch_tokens]
    while counts[-1] // 2 >= MIN_TOKENS:
        counts.append(counts[-1] // 2)
    for changed, changes in _ladder(config, has_host):
        fewer = [_changed((changed, ()), [("engine.micro_batch_tokens", count,
                                           "fewer activations at once: more passes, the same gradient")])
                 for count in counts]
        yield [(smaller, first + changes) for smaller, first in fewer]


def _ladder(config: object, has_host: bool) -> Iterator[Candidate]:
    """The given settings, then each change on top of those before it."""
    steps: list[Callable[[Any], list[Setting]]] = [lambda _: [
        ("model.gradient_checkpointing", True, "activations are computed again: a third more time")]]
    if has_host:
        steps += [_idle_roles, partial(_offload, "optimizer"), partial(_offload, "activations")]
    current: Candidate = (config, ())
    yield current
    for step in steps:
        before, current = current, _changed(current, step(current[0]))
        if current[1] != before[1]:
            yield current
    if config.model.lora.r and not config.model.quantize and not config.model.preset:
        for kind in ("8bit", "4bit"):
            yield _changed(current, [(f"model.load_in_{kind}", True,
                                      f"the frozen base in {kind[0]} bits a weight: other numbers")])
    if has_host and not config.model.quantize and (settings := _offload("parameters", current[0])):
        yield _changed(current, settings)


def _changed(before: Candidate, settings: list[Setting]) -> Candidate:
    """The candidate with other values; if an option changes twice, the value before the first stays."""
    config, changes = before[0], {change.option: change for change in before[1]}
    for option, value, why in settings:
        old = value_of(config, option)
        if old == value:
            continue
        first = changes.get(option, Change(option, _shown(old), "", ""))
        changes[option] = replace(first, chosen=_shown(value), why=f"{first.why}; {why}" if first.why else why)
        config = with_value(config, option, value)
    return config, tuple(changes.values())


def _shown(value: object) -> str:
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value).lower()


def _idle_roles(config: object) -> list[Setting]:
    """Bases of their own wait on the host while other roles compute."""
    method, roles = getattr(config, "method", None), getattr(config, "roles", None)
    if method is None or config.model.lora.r:
        return []
    is_there = {"actor": True, "ref": method.needs_ref, "critic": method.needs_critic,
                "reward": config.reward.has_model(roles, config.environment, is_needed=method.needs_reward),
                "teacher": method.needs_teacher}
    return [(f"roles.{name}.offload", True, "waits in the CPU's memory while others compute")
            for name in is_there if is_there[name] and not getattr(roles, name).offload]


_WHY_OFFLOAD = {"optimizer": "optimizer state and step on the CPU: slower steps",
                "activations": "activations wait in the CPU's memory: slower passes",
                "parameters": "weights come from the CPU layer by layer (ZeRO 3): much slower"}


def _offload(name: str, config: Any) -> list[Setting]:
    before, stage = list(config.engine.offload), config.engine.zero_stage
    schedules = [config.train] if hasattr(config, "train") else vars(config.stages).values()  # one, or all stages'
    is_other = name == "optimizer" and any(train.optim not in ("adamw", "adamw_unfused") for train in schedules)
    if name in before or (stage is not None and stage < OFFLOADS[name]) or is_other:
        return []
    return [("engine.offload", [*before, name], _WHY_OFFLOAD[name])]
