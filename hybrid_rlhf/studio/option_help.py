"""Every option of a stage with its kind, its default and what --help says of it, from the settings' own classes.

Imports torch, as they do: for the process that answers the page's questions, never for the studio's own.
"""

from __future__ import annotations

import importlib
import types
import typing
from typing import Any

from hybrid_rlhf import cli
from hybrid_rlhf.algorithms import divergence, schedule
from hybrid_rlhf.algorithms.preference import LOSSES
from hybrid_rlhf.core.config import help_of_options
from hybrid_rlhf.core.options import type_of, value_of
from hybrid_rlhf.engine.train.optimizers import OPTIMIZERS
from hybrid_rlhf.models.load import ATTENTIONS, PRESETS
from hybrid_rlhf.rewards.judge.judge_config import MODES, ON_FAILURE, PROBABILITY, VERDICT
from hybrid_rlhf.roles.sharing import CRITIC_KINDS, DTYPE_NAMES, QUANTIZATIONS, SHARING
from hybrid_rlhf.studio.common_options import by_table, common_options
from hybrid_rlhf.studio.plain_settings import plain
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
    found = next((known for end, known in CHOICES.items() if f".{name}".endswith(f".{end}")), ())
    return (*found, POLICY_GRADIENT) if name == "distill.divergence" and stage == "distill" else found


def _kind(kind: Any) -> str:
    """The word for a type; of a union a list before text, and text before a mapping."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    members = [typing.get_origin(k) or k for k in (typing.get_args(kind) if is_union else (kind,))]
    if dict in members and list in members:  # data.sources
        return "json"
    return next(_KINDS[k] for k in (list, str, dict, float, int, bool) if k in members)
