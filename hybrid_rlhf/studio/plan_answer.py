"""What --plan finds, as data for a page."""

from __future__ import annotations

import yaml

from hybrid_rlhf.core.distributed import device
from hybrid_rlhf.memory_plan.amounts import Cards
from hybrid_rlhf.memory_plan.plan import Plan
from hybrid_rlhf.memory_plan.presets import card as card_of
from hybrid_rlhf.memory_plan.search import Change
from hybrid_rlhf.memory_plan.table import verdict
from hybrid_rlhf.training import time_options
from hybrid_rlhf.training.memory_options import Place, look_ahead


def plan_answer(config: object, memory: int | None, card: str | None) -> dict:
    """memory: bytes that the run may use (None: what is free). card: the name of one that need not be here. Raises
    UserError as the launcher does.

    Of several stages the phases are those of all, and the rest is of the one that comes nearest to the memory."""
    gib = card_of(card, "card").gib if card else None
    is_elsewhere = gib is not None and memory is None and device().type == "cpu"
    place = Place.of(Cards(1, 1, (gib or 0) << 30)) if is_elsewhere else Place.here(memory)
    config, plans, chosen = look_ahead(config, place)
    largest = max(plans, key=lambda plan: plan.peak)
    fits, changes = all(p.short <= 0 for p in plans), chosen.changes if chosen.fits else ()
    said = verdict(largest, chosen.flags if chosen.fits else ())
    stages = [plan.title.partition(":")[0] for plan in plans]

    def named(stage: str, name: str) -> str:
        return f"{stage}: {name}" if len(plans) > 1 else name

    return {"fits": fits, "available": largest.available, "title": largest.title, "host": max(p.host for p in plans),
            "phases": [{"name": named(stage, phase), "bytes": plan.total(phase)}
                       for stage, plan in zip(stages, plans, strict=True) for phase in plan.phases],
            "lines": [{"name": f"{line.role}: {line.kind}", "bytes": line.phases[largest.peak_phase]}
                      for line in largest.lines if line.phases.get(largest.peak_phase)],
            "peak": {"name": named(stages[plans.index(largest)], largest.peak_phase), "bytes": largest.peak},
            "verdict": named(stages[plans.index(largest)], said), "advice": [] if fits else [
                f"{change.option} {change.chosen}: {change.why}" for change in changes],
            "changes": [] if fits else [_change(change) for change in changes],
            "plan_notes": [note for plan in plans for note in plan.notes], **_times(plans, stages, place)}


def _change(change: Change) -> dict:
    return {"option": change.option, "value": yaml.safe_load(change.chosen), "why": change.why}


def _times(plans: list[Plan], stages: list[str], place: Place) -> dict:
    """Seconds of a step by phase, on the first device that they can be told for."""
    times, source = [], ""
    for stage, plan in zip(stages, plans, strict=True):
        rows, source = time_options.predicted([("as given", plan)], place.device, place.card)
        if not rows:
            return {"times": [], "device": None, "time_note": f"time is not predicted: {source}"}
        found, prefix = rows[0][1], f"{stage}: " if len(plans) > 1 else ""
        times += [{"name": f"{prefix}{phase}", "seconds": seconds} for phase, seconds in found.phases.items()]
        times += [{"name": f"{prefix}a step", "seconds": found.whole}]
        times += [{"name": f"{prefix}the run of {found.steps} steps", "seconds": found.whole * found.steps}
                  ] if found.steps else []
    left_out = time_options.left_out(plans[0])
    note = f"predicted and not measured: {source}" + (f"; not counted: {', '.join(left_out)}" if left_out else "")
    return {"times": times, "device": found.device, "time_note": note}
