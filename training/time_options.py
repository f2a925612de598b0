"""Predict how long a planned run takes, by the rates of a device, and print it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TextIO

import torch

from hybrid_rlhf.memory_plan import machine_rates, rates
from hybrid_rlhf.memory_plan.amounts import Cards
from hybrid_rlhf.memory_plan.calibration import read_rates
from hybrid_rlhf.memory_plan.plan import Plan, size_text
from hybrid_rlhf.memory_plan.rates import CARDS, Rates
from hybrid_rlhf.memory_plan.step_time import StepTime, step_time
from hybrid_rlhf.memory_plan.table import show_times
from hybrid_rlhf.models import load

PUBLISHED = "from published figures and assumed shares of them"


def print_times(plans: Sequence[tuple[str, Plan]], device: torch.device, cards: Cards | None, stream: TextIO) -> None:
    """Print the time of a step of each plan on each device, by settings; or one line with the reason why not."""
    rows, source = predicted(plans, device, cards)
    if not rows:
        print(f"time is not predicted: {source}", file=stream)
        return
    show_times(rows, source, stream)
    if missing := left_out(plans[0][1]):
        print(f"not counted: {', '.join(missing)}", file=stream)


def predicted(plans: Sequence[tuple[str, Plan]], device: torch.device, cards: Cards | None
              ) -> tuple[list[tuple[str, StepTime]], str]:
    """(settings, time of a step) for each device and plan, and the source of the rates; [] and why there are none."""
    device_rates, source = rates_for(device, cards, load.resolve_dtype(plans[0][1].roles[0].model.dtype, device))
    return [(settings, times_of(plan, device, each)) for each in device_rates for settings, plan in plans], source


def times_of(plan: Plan, device: torch.device, device_rates: Rates) -> StepTime:
    samples = any(role.generation for role in plan.roles)
    by = ("as long as the data's on the average" + ", responses as the settings allow" * samples if plan.timed
          else "as long as the settings allow")
    return replace(step_time(plan.timed or plan.roles, device, device_rates), steps=plan.steps, lengths=by)


def rates_for(device: torch.device, cards: Cards | None, dtype: torch.dtype) -> tuple[list[Rates], str]:
    """The rates to predict by, and their source; [] and why there are none."""
    if cards is not None:
        named = [CARDS[cards.name]] if cards.name else rates.cards_with(cards.memory)
        return [rates.rates_of_card(c) for c in named], PUBLISHED if named else (
            f"no card of {size_text(cards.memory)} is in the table; name one of {', '.join(CARDS)}, as in --cards 4090")
    if device.type == "cpu":
        if not machine_rates.can_measure():
            return [], "our kernels are not compiled yet; hybrid-rlhf doctor does it, or the first run"
        return [machine_rates.machine_rates(dtype)], "from rates measured just now"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    if measured := read_rates(name):
        return [measured], "from rates that hybrid-rlhf qualify measured on this card"
    known = rates.figures_of(name)
    return [rates.rates_of_card(known)] if known else [], PUBLISHED if known else (
        f"{name} is not in the table; hybrid-rlhf qualify measures it, or --cards names one of {', '.join(CARDS)}")


def left_out(plan: Plan) -> list[str]:
    """Work of this run that the prediction does not count."""
    roles = plan.roles
    return [*(["models among the reward sources"] if any(r.labels for r in roles) else []),
            *(["moving what is offloaded"] if any(r.offload or r.waits for r in roles) else []),
            *(["what processes send each other"] if plan.title.split(": ")[1].split()[0] != "1" else []),
            *(["texts mixed into the actor's steps"] if any(r.texts for r in roles) else [])]
