"""Every option of a stage with its kind, its default and its help, and settings as JSON, from the settings' classes.

Imports torch, as they do: for the process that answers the page's questions, not for the studio's own.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import types
import typing
from collections.abc import Iterator
from typing import Any

from hybrid_rlhf import cli
from hybrid_rlhf.algorithms import divergence, schedule
from hybrid_rlhf.algorithms.preference import LOSSES
from hybrid_rlhf.core.config import help_of_options
from hybrid_rlhf.core.options import type_of, value_of
from hybrid_rlhf.data.sources import Source
from hybrid_rlhf.engine.train.optimizers import OPTIMIZERS
from hybrid_rlhf.models.load import ATTENTIONS, PRESETS
from hybrid_rlhf.rewards.judge.judge_config import MODES, ON_FAILURE, PROBABILITY, VERDICT
from hybrid_rlhf.roles.sharing import CRITIC_KINDS, DTYPE_NAMES, QUANTIZATIONS, SHARING
from hybrid_rlhf.studio.settings_text import by_table, common_options
from hybrid_rlhf.trainers.distillation import POLICY_GRADIENT
from hybrid_rlhf.trainers.ppo_config import CHOICES as PPO_CHOICES
from hybrid_rlhf.training import unread_options
from hybrid_rlhf.training.evaluation_prompts import ROWS
from hybrid_rlhf.training.registry import STAGES, variant_options
from hybrid_rlhf.training.scored_answers import CHECKERS

# The end of an option's name -> what it may be.
CHOICES: dict[str, tuple[str, ...]] = {
    "model.preset": tuple(PRESETS), "dtype": DTYPE_NAMES, "attn_implementation": ATTENTIONS,
    "data.train_on": ("response", "all"), "optim": tuple(OPTIMIZERS), "lr_scheduler_type": schedule.KINDS,
    "roles.share_base": SHARING, "kind": CRITIC_KINDS, "quantize": QUANTIZATIONS, "judge.mode": MODES,
    "judge.score": (VERDICT, PROBABILITY), "judge.on_failure": ON_FAILURE, "distill.divergence": divergence.KINDS,
    "dpo.loss_type": tuple(LOSSES), "evaluate.rows": ROWS, "checker": tuple(CHECKERS),
    **{f"ppo.{name}": tuple(filter(None, known)) for name, known in PPO_CHOICES.items()}}
_KINDS = {bool: "bool", int: "int", float: "float", str: "text", list: "list", dict: "json"}
LEFT_OUT = ("stage", "output_dir")  # the goal and the name of the run say these


def options_of(stage: str) -> dict:
    """{"options": [...], "help"} of a stage; KeyError of one that there is not."""
    row, common = STAGES[stage], common_options(stage)
    config_class = importlib.import_module(row.module).Config
    defaults, _ = cli.read_settings(stage, [])
    helps = help_of_options(config_class, unread_options.of_stage(stage))
    fixed = {*LEFT_OUT, *variant_options(stage)}
    options = [_option(config_class, stage, name, text, value_of(defaults, name), name in common)
               for name, text in helps.items() if name not in fixed]
    order = {name: i for i, name in enumerate(common)}
    return {"help": row.help, "options": sorted(options, key=lambda o: order.get(o["name"], len(order)))}


def _option(config_class: type, stage: str, name: str, text: str, default: object, is_common: bool) -> dict:
    kind, choices = type_of(config_class, name), _choices(stage, name)
    return {"name": name, "section": name.rpartition(".")[0], "kind": "choice" if choices else _kind(kind),
            "choices": list(choices), "default": plain(default), "null": type(None) in typing.get_args(kind),
            "help": text, "by_table": by_table(stage, name), "is_common": is_common}


def _choices(stage: str, name: str) -> tuple[str, ...]:
    choices = next((known for end, known in CHOICES.items() if f".{name}".endswith(f".{end}")), ())
    return (*choices, POLICY_GRADIENT) if name == "distill.divergence" and stage == "distill" else choices


def _kind(kind: Any) -> str:
    """The word for a type; of a union a list before text, and text before a mapping."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    members = [typing.get_origin(k) or k for k in (typing.get_args(kind) if is_union else (kind,))]
    if dict in members and list in members:  # data.sources
        return "json"
    return next(_KINDS[k] for k in (list, str, dict, float, int, bool) if k in members)


# -- settings as JSON --------------------------------------------------------------------------------------------------


def plain_settings(config: object) -> dict[str, object]:
    """Every option of nested settings, in their order."""
    return dict(_leaves(config, ""))


def _leaves(config: object, prefix: str) -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(config):  # type: ignore[arg-type]  # a dataclass of settings
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", plain(value)


def plain(value: object) -> object:
    """A value as JSON has it. A source with nothing but a path is that text, and so is a number that is not finite."""
    if isinstance(value, Source):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        chosen = {k: v for k, v in fields.items() if k == "path" or (v and (k, v) != ("split", "train"))}
        return value.path if list(chosen) == ["path"] else chosen
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
