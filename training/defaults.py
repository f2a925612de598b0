"""The defaults that depend on the method, on LoRA and on the model's size: one table, by which `null` is filled in.

docs/guide/hyperparameters.md says which values are the literature's and which were measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import NamedTuple

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.options import value_of, with_value
from hybrid_rlhf.models import shapes
from hybrid_rlhf.models.load import ModelConfig, configuration
from hybrid_rlhf.run import runfile
from hybrid_rlhf.training import builders


class Rate(NamedTuple):
    """A learning rate for all weights, and one for adapters."""

    full: float
    lora: float


# Below so many parameters every rate of the table is multiplied by the factor: GRPO of all weights takes 1e-5 for 135
# million (docs/results/smollm2.md), and nothing larger was measured.
SMALL_MODEL, SMALL_FACTOR = 200_000_000, 10


def _missing_eos_penalty(config: object) -> float:
    """A learned score says nothing of the end of a response; a function says what it rewards."""
    return 1.0 if config.reward.has_model(config.roles) else 0.0


_STEPS = "train.max_steps"  # taken where train.num_train_epochs is not given either: few prompts are no short run
_ROWS = {"train.num_train_epochs": 1.0, "train.per_device_train_batch_size": 8}
_DPO = {"train.learning_rate": Rate(1e-6, 1e-5)} | _ROWS
_SAMPLED = {"roles.actor.learning_rate": Rate(1e-6, 2e-5), _STEPS: 100, "train.per_device_train_batch_size": 8}
_POLICY = _SAMPLED | {"ppo.num_ppo_epochs": 1, "ppo.num_minibatches": 1,
                      "ppo.missing_eos_penalty": _missing_eos_penalty}
_GROUPS = _POLICY | {"ppo.kl_coef": 0.04}  # 8 prompts and 8 responses to each
_SINGLE = _POLICY | {"ppo.kl_coef": 0.1, "train.per_device_train_batch_size": 64}

# method -> option -> what null means there: a value, a Rate, or a function of the settings
TABLE: dict[str, dict[str, float | Rate | Callable[[object], float]]] = {
    "sft": {"train.learning_rate": Rate(2e-5, 2e-4)} | _ROWS | {"train.num_train_epochs": 3.0},
    "reward": {"train.learning_rate": Rate(1e-5, 1e-4)} | _ROWS,
    "dpo": _DPO, "ipo": _DPO, "hinge": _DPO, "kto": _DPO, "simpo": _DPO,
    "orpo": _DPO | {"train.learning_rate": Rate(8e-6, 8e-5)},
    "ppo": _SINGLE | {"roles.critic.learning_rate": Rate(1e-5, 1e-4), "ppo.num_ppo_epochs": 2,
                      "ppo.num_minibatches": 2},
    "reinforce_pp": _SINGLE,
    "reinforce_pp_baseline": _GROUPS, "grpo": _GROUPS, "dr_grpo": _GROUPS, "rloo": _GROUPS, "cispo": _GROUPS,
    "gspo": _GROUPS | {"ppo.num_minibatches": 4},
    "online_dpo": _SAMPLED | {"train.per_device_train_batch_size": 32},  # two responses to each
    "rejection": _SAMPLED | {"roles.actor.learning_rate": Rate(2e-5, 2e-4)},
}


def method_of(config: object) -> str:
    """The row of TABLE that a recipe's settings go by."""
    if hasattr(config, "ppo"):
        ppo = config.ppo
        return "ppo" if ppo.needs_critic else ppo.policy_loss if ppo.policy_loss in TABLE and ppo.policy_loss != "ppo" \
            else ppo.estimator
    if hasattr(config, "dpo") and not hasattr(config, "online"):
        return {"sigmoid": "dpo"}.get(config.dpo.loss_type, config.dpo.loss_type)
    return {"conditional_sft": "sft"}.get(config.stage, config.stage)


def resolve(config: object, start: ModelConfig | None = None) -> object:
    """The settings with every null of the table filled in.

    Settings without one are returned as they are. A run that is found in output_dir keeps the values that it was made
    with.

    start: the model that the run starts from, where an earlier stage of the same command has not left it yet.
    """
    row, recorded, found = TABLE.get(method_of(config), {}), _recorded(config), {}
    missing = _missing(config, row, recorded)
    if not missing:
        return config
    is_small = None
    for option in missing:
        value = reduce(lambda part, name: (part or {}).get(name), option.split("."), recorded)
        if value is None:
            value = row[option](config) if callable(row[option]) else row[option]
        if isinstance(value, Rate):
            if is_small is None:
                is_small = _is_small(start or _start(config))
            value = (value.lora if config.model.lora.r else value.full) * (SMALL_FACTOR if is_small else 1)
            value = float(f"{value:.6g}")  # 1e-5, where the product is 9.999999999999999e-06
        found[option] = value
    for option, value in found.items():
        config = with_value(config, option, value)
    return config


def _missing(config: object, row: dict, recorded: dict) -> list[str]:
    """The options of the row that are left open. A run's length is open where neither steps nor epochs are given, and
    an earlier run of this folder may have gone by epochs."""
    missing = [option for option in row if value_of(config, option) is None]
    if _STEPS in row and config.train.max_steps == -1 and config.train.num_train_epochs is None:
        by_epochs = recorded.get("train", {}).get("num_train_epochs") is not None
        missing.append("train.num_train_epochs" if by_epochs else _STEPS)
    return missing


def told(config: object) -> str:
    """The values that the run goes by of all options that the table has for its method, given or filled in."""
    found = {option: value_of(config, option) for option in TABLE.get(method_of(config), {})}
    rates = [(TABLE[method_of(config)][option], value) for option, value in found.items() if option.endswith("_rate")]
    is_small = any(math.isclose(value or 0, SMALL_FACTOR * (rate.lora if config.model.lora.r else rate.full))
                   for rate, value in rates)
    note = f" (rates {SMALL_FACTOR} times the usual ones, for a model so small)" if is_small else ""
    return ", ".join(f"{option} {value:g}" for option, value in found.items() if value not in (None, -1)) + note


def _recorded(config: object) -> dict:
    """The settings of the run in output_dir, of the same stage, where this one is to go on with it."""
    if config.resume == "never" or not (Path(config.output_dir) / runfile.RUN_FILE).exists():
        return {}
    record = runfile.read_run(config.output_dir)
    return record.config if record.stage == config.stage else {}


def _start(config: object) -> ModelConfig:
    """The model that the policy starts from, whether it is there or not."""
    if config.model.preset:
        return config.model
    actor = config.roles.actor.model_name_or_path if hasattr(config, "roles") else None
    path = actor or config.model.model_name_or_path or str(Path(config.output_dir).parent / "sft")
    return replace(config.model, model_name_or_path=builders.model_folder(path))


def _is_small(model: ModelConfig) -> bool:
    """By its configuration alone. A model that cannot be read is none: what opens it says what is wrong."""
    try:
        settings = shapes.read_config(model) if model.preset else configuration(model)
        empty = shapes.count_parameters(settings, trust_remote_code=model.trust_remote_code)
    except UserError:
        return False
    return empty < SMALL_MODEL
