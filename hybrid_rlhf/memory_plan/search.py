"""Finds settings that fit a given memory: tries changes, the cheapest first, and says what was chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

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
    for changed, changes in _ladder(config, has_host):
        most = changed.engine.micro_batch_tokens
        yield [(replace(changed, engine=replace(changed.engine, micro_batch_tokens=count)),
                (*([_fewer_tokens(most, count)] if count != most else []), *changes)) for count in _halvings(most)]


def _fewer_tokens(most: int, count: int) -> Change:
    return Change("engine.micro_batch_tokens", str(most), str(count),
                  "fewer activations at once: more passes, the same gradient")


def _ladder(config: object, has_host: bool) -> Iterator[Candidate]:
    """The given settings, then each change on top of those before it."""
    current: Candidate = (config, ())
    yield current
    steps = [_checkpointing, *([_idle_roles, _optimizer, _activations] if has_host else [])]
    for step in steps:
        after = step(current[0])
        if after:
            current = _added(current, after)
            yield current
    for kind in ("8bit", "4bit"):
        if config.model.lora.r and not config.model.quantize and not config.model.preset:
            name = f"load_in_{kind}"
            yield (replace(current[0], model=replace(current[0].model, **{name: True})),
                   (*current[1], Change(f"model.{name}", "false", "true",
                                        f"the frozen base in {kind[0]} bits a weight: other numbers")))
    if has_host and (after := _parameters(current[0])):
        yield _added(current, after)


def _added(before: Candidate, after: Candidate) -> Candidate:
    """One change after others; if an option changes twice, the value before the first stays."""
    options = {change.option: change for change in before[1]}
    for change in after[1]:
        if first := options.get(change.option):
            change = replace(change, before=first.before, why=f"{first.why}; {change.why}")
        options[change.option] = change
    return after[0], tuple(options.values())


def _checkpointing(config: object) -> Candidate | None:
    if config.model.gradient_checkpointing:
        return None
    return (replace(config, model=replace(config.model, gradient_checkpointing=True)),
            (Change("model.gradient_checkpointing", "false", "true",
                    "activations are computed again: a third more time"),))


def _idle_roles(config: object) -> Candidate | None:
    """Bases of their own wait on the host while other roles compute."""
    method, roles = getattr(config, "method", None), getattr(config, "roles", None)
    if method is None or config.model.lora.r:
        return None
    is_there = {"actor": True, "ref": method.needs_ref, "critic": method.needs_critic,
                "reward": config.reward.has_model(roles, config.environment, is_needed=method.needs_reward),
                "teacher": method.needs_teacher}
    names = [n for n in is_there if is_there[n] and not getattr(roles, n).offload]
    if not names:
        return None
    changed = replace(roles, **{n: replace(getattr(roles, n), offload=True) for n in names})
    return (replace(config, roles=changed),
            tuple(Change(f"roles.{n}.offload", "false", "true", "waits in the CPU's memory while others compute")
                  for n in names))


def _with_offload(config: object, name: str, least_stage: int, why: str) -> Candidate | None:
    before = list(config.engine.offload)
    stage = config.engine.zero_stage
    if name in before or (stage is not None and stage < least_stage):
        return None
    after = [*before, name]
    return (replace(config, engine=replace(config.engine, offload=after)),
            (Change("engine.offload", f"[{', '.join(before)}]", f"[{','.join(after)}]", why),))


def _optimizer(config: object) -> Candidate | None:
    schedules = [config.train] if hasattr(config, "train") else vars(config.stages).values()  # one, or all stages'
    if any(train.optim not in ("adamw", "adamw_unfused") for train in schedules):
        return None
    return _with_offload(config, "optimizer", 1, "optimizer state and step on the CPU: slower steps")


def _activations(config: object) -> Candidate | None:
    return _with_offload(config, "activations", 0, "activations wait in the CPU's memory: slower passes")


def _parameters(config: object) -> Candidate | None:
    if config.model.quantize:
        return None
    return _with_offload(config, "parameters", 3, "weights come from the CPU layer by layer (ZeRO 3): much slower")


def _halvings(start: int) -> Iterator[int]:
    yield start
    while start // 2 >= MIN_TOKENS:
        start //= 2
        yield start
