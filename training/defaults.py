"""Fill in the settings that are `null`, by the method, LoRA and the model's size (the table is in registry.py), and by
the machine: the dtype of weights trained on a CPU, and LoRA where memory is short.

docs/guide/hyperparameters.md says which values come from the literature and which were measured.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import reduce
from pathlib import Path

import torch

from hybrid_rlhf.algorithms.preference import LOSSES
from hybrid_rlhf.core.accelerator import bf16_line, bf16_unit
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import device, world_size
from hybrid_rlhf.core.options import value_of, with_value
from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.engine.decode.kv_cache import free_bytes
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.engine.train.optimizers import MASTERED
from hybrid_rlhf.models import shapes
from hybrid_rlhf.models.load import ModelConfig, configuration, configured_positions
from hybrid_rlhf.run import runfile
from hybrid_rlhf.training import builders, unread_options
from hybrid_rlhf.training.registry import MAX_STEPS, STAGES, By, Rate

# Below SMALL_MODEL parameters every rate of the table is multiplied by its factor `small`: GRPO of all weights takes
# 1e-5 for 135 million (docs/results/smollm2.md), and nothing larger was measured. Below TINY_MODEL: by TINY_FACTOR.
SMALL_MODEL, TINY_MODEL, TINY_FACTOR = 200_000_000, 20_000_000, 10
# What null meant to runs that were made before the table had the option.
FORMERLY = {"ppo.update_kl": 0.0, "ppo.early_stop_kl": 0.0}
# Below so many weights the overhead of calls, not matrix products, takes a step's time: bfloat16 does not help.
LEAST_FOR_BF16 = 20_000_000
RANK, SHARE = 16, 0.75  # rank of adapters; share of the free memory for weights and optimizers, not activations
TRAINED, FROZEN = 16, 4  # bytes of a weight at most: fp32 with gradient and moments, or bf16 with an fp32 master


def method_of(config: object) -> str:
    """The stage whose defaults apply to a recipe's settings: --stage ppo with ppo.estimator grpo is grpo."""
    if hasattr(config, "ppo"):
        ppo = config.ppo
        return "ppo" if ppo.needs_critic else ppo.policy_loss if ppo.policy_loss in ("gspo", "cispo") else ppo.estimator
    if hasattr(config, "dpo") and not hasattr(config, "online"):
        return {"sigmoid": "dpo"}.get(config.dpo.loss_type, config.dpo.loss_type)
    return config.stage


def of_method(config: object) -> dict:
    """Option -> what null means there, for the method of these settings. A method that is not a stage has the defaults
    of its stage, without the options that it does not read."""
    if row := STAGES.get(method_of(config)):
        return row.defaults
    stage = STAGES.get(config.stage)
    unread = tuple(f"{option}." for option in unread_options.of(config)) if stage else ()
    return {option: value for option, value in (stage.defaults if stage else {}).items()
            if not f"{option}.".startswith(unread)}


def resolve(config: object, start: ModelConfig | None = None) -> object:
    """The settings with every null of the table filled in.

    Settings without a null are returned unchanged, except that default lengths beyond the model's positions are
    lowered. An existing run in output_dir keeps the values that it was made with.

    start: the model that the run starts from, where an earlier stage of the same command has not written it yet.
    """
    config, recorded = _within_positions(config, start), of_run(config)
    before, trains = recorded.get("model", {}), hasattr(config, "train")
    if trains and config.model.dtype == "auto":
        config = (with_value(config, "model.dtype", before.get("dtype", "auto")) if recorded
                  else with_dtype(config, start or start_of(config)))
    if trains and config.model.lora.r is None:
        rank = before.get("lora", {}).get("r")
        config = with_rank(config, start or start_of(config), rank)
    row, values = of_method(config), {}
    missing = _missing(config, row, recorded)
    if not missing:
        return config
    weights: int | None = None
    for option in missing:
        value = reduce(lambda part, name: (part or {}).get(name), option.split("."), recorded)
        if value is None and recorded:
            value = FORMERLY.get(option)
        if value is None:
            value = row[option].value(config) if isinstance(row[option], By) else row[option]
        if isinstance(value, Rate):
            weights = weights or num_weights(start or start_of(config)) or SMALL_MODEL
            value = (value.lora if config.model.lora.r else value.full) * _factor(value, weights)
            value = float(f"{value:.6g}")  # 1e-5, where the product is 9.999999999999999e-06
        values[option] = value
    for option, value in values.items():
        config = with_value(config, option, value)
    return config


def _lengths(config: object) -> dict[str, int]:
    """The options whose tokens must together fit into the model's positions, with their defaults."""
    for section in ("ppo", "online", "rejection", "distill"):
        if hasattr(getattr(config, section, None), "sampling"):
            return {"data.max_prompt_length": DataConfig.max_prompt_length,
                    f"{section}.sampling.max_new_tokens": SamplingConfig.max_new_tokens}
    is_read = hasattr(config, "data") and not hasattr(config, "roles")
    return {"data.max_length": DataConfig.max_length} if is_read else {}


def _within_positions(config: object, start: ModelConfig | None) -> object:
    """Lower default lengths to the positions of a model that has fewer, each by the same part; values of the user's
    stay."""
    defaults = _lengths(config)
    lengths = {option: value_of(config, option) for option in defaults}
    usual = [option for option, value in lengths.items() if value == defaults[option]]
    limit = _positions(start or start_of(config)) if usual else None
    if limit and sum(lengths.values()) > limit:
        left = limit - sum(value for option, value in lengths.items() if option not in usual)
        for option in usual if left >= len(usual) else ():
            config = with_value(config, option, left // len(usual))
    return config


def _positions(model: ModelConfig) -> int | None:
    """The model's positions; None where it cannot be read (the error is raised where it is opened)."""
    try:
        return configured_positions(model)
    except UserError:
        return None


def _missing(config: object, row: dict, recorded: dict) -> list[str]:
    """The options of the row that are null. A run's length is open where neither steps nor epochs are given, and an
    earlier run of this folder may have counted epochs."""
    missing = [option for option in row if value_of(config, option) is None]
    if MAX_STEPS in row and config.train.max_steps == -1 and config.train.num_train_epochs is None:
        by_epochs = recorded.get("train", {}).get("num_train_epochs") is not None
        missing.append("train.num_train_epochs" if by_epochs else MAX_STEPS)
    return missing


def settings_line(config: object) -> str:
    """The values of all options that the table has for the run's method, given or filled in, as one line."""
    values = {option: value_of(config, option) for option in of_method(config)}
    if config.train.max_steps > 0:  # max_steps takes precedence
        values.pop("train.num_train_epochs", None)
    values |= {option: value for option, usual in _lengths(config).items()
               if (value := value_of(config, option)) < usual}
    rates = [(of_method(config)[option], value) for option, value in values.items() if option.endswith("_rate")]
    weights = (num_weights(start_of(config)) if rates else None) or SMALL_MODEL
    factors = [factor for rate, value in rates if (factor := _factor(rate, weights)) > 1 and math.isclose(
        value or 0, factor * (rate.lora if config.model.lora.r else rate.full))]
    note = f" (rates {max(factors):g} times the usual ones, for a model so small)" if factors else ""
    return ", ".join(f"{option} {value:g}" for option, value in values.items() if value not in (None, -1)) + note


def of_run(config: object) -> dict:
    """The settings of the run of the same stage in output_dir that is to be resumed; {} where there is none."""
    record = None if config.resume == "never" else runfile.run_at(config.output_dir)
    return record.config if record and record.stage == config.stage else {}


def start_of(config: object) -> ModelConfig:
    """The model that the policy starts from, whether it exists or not."""
    if config.model.preset:
        return config.model
    actor = config.roles.actor.model_name_or_path if hasattr(config, "roles") else None
    path = actor or config.model.model_name_or_path or str(Path(config.output_dir).parent / "sft")
    return replace(config.model, model_name_or_path=builders.model_folder(path))


def _factor(rate: Rate, weights: int) -> float:
    return TINY_FACTOR if weights < TINY_MODEL else rate.small if weights < SMALL_MODEL else 1


# -- by the machine ----------------------------------------------------------------------------------------------------


def with_dtype(config: object, start: ModelConfig) -> object:
    """The settings with bfloat16 for model.dtype auto, where the processor multiplies it and fp32 masters are kept
    beside the weights: a model that is not small, trained on a CPU by one process with AdamW. start: the model that the
    run starts from. On a GPU auto stays, and loading resolves it."""
    if (config.model.dtype != "auto" or device().type != "cpu" or world_size() > 1 or config.model.quantize
            or config.train.optim not in MASTERED or bf16_unit() is None
            or (num_weights(start) or 0) < LEAST_FOR_BF16):
        return config
    return replace(config, model=replace(config.model, dtype="bfloat16"))


def with_rank(config: object, start: ModelConfig, recorded: int | None = None) -> object:
    """The settings with model.lora.r filled in: as `recorded` by the run that is resumed; else 0 (all weights), or RANK
    with a line where training all would not fit into the free memory. Always 0 with settings that already take less
    memory in one place: quantised bases, model.freeze, offloading, a smaller optimizer, several processes."""
    if recorded is None:
        recorded, free, count = 0, free_bytes(device()), num_weights(start)
        roles = vars(config.roles).values() if hasattr(config, "roles") else ()
        is_other = (config.model.quantize or config.model.freeze or config.train.optim not in MASTERED
                    or config.engine.offload or any(getattr(role, "offload", False) for role in roles)
                    or world_size() > 1)
        if free is not None and count is not None and not is_other and (
                needed := training_bytes(config, count)) > SHARE * free:
            recorded = RANK
            print(f"model.lora.r {RANK}: training all weights would take about {needed / 2**30:.0f} GiB, and "
                  f"{free / 2**30:.0f} are free; 0 trains them all the same", file=sys.stderr)
    return replace(config, model=replace(config.model, lora=replace(config.model.lora, r=recorded)))


def training_bytes(config: object, count: int) -> int:
    """Bytes of weights, gradients and optimizers of a run that trains all `count` weights of its models. A stage that
    samples is assumed to have a reference or a teacher."""
    trained, frozen = 1, 0
    if hasattr(config, "roles"):
        trained += hasattr(config, "ppo") and config.ppo.needs_critic
        frozen = 1 + (hasattr(config, "reward") and config.reward.has_model(config.roles, config.environment))
    elif hasattr(config, "dpo"):
        frozen = int(LOSSES[config.dpo.loss_type].needs_reference)
    return count * (TRAINED * trained + FROZEN * frozen)


def num_weights(model: ModelConfig) -> int | None:
    """Number of weights by the model's configuration; None where it cannot be read (opening it raises the error)."""
    try:
        settings = shapes.read_config(model) if model.preset else configuration(model)
        return shapes.count_parameters(settings, trust_remote_code=model.trust_remote_code)
    except UserError:
        return None


def reason(config: object, dtype: torch.dtype, total: int) -> str:
    """Why the weights, `total` in number, are in `dtype` on a CPU; empty on a GPU, and where nothing is notable."""
    if device().type != "cpu":
        return ""
    if dtype == torch.bfloat16:
        return f" (fp32 masters; {bf16_line()})" if config.train.optim in MASTERED else f" ({bf16_line()})"
    is_left_open = config.model.dtype == "auto" and not config.model.quantize and total >= LEAST_FOR_BF16
    return f" ({bf16_line()})" if is_left_open and bf16_unit() is None else ""
