"""TRL's configurations: the same names and defaults, as settings of a stage here. trl_fields.py has the table."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import ClassVar, NamedTuple

from hybrid_rlhf import trl_fields
from hybrid_rlhf.core.config import UserError, check, nearest
from hybrid_rlhf.core.distributed import device
from hybrid_rlhf.data.sources import as_sources, first_rows
from hybrid_rlhf.run.checkpointing import SMALL_IS_GOOD
from hybrid_rlhf.trl_fields import IDLE, REFUSED, TAKEN, Field

_OPTIMIZERS = {"adamw_torch_fused": "adamw", "adamw_torch": "adamw", "adamw_8bit": "adamw_8bit", "sgd": "sgd",
               "adamw_bnb_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit", "paged_adamw_32bit": "adamw"}
_SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")
_LOADING = {"dtype": "model.dtype", "torch_dtype": "model.dtype", "attn_implementation": "model.attn_implementation",
            "trust_remote_code": "model.trust_remote_code", "load_in_4bit": "model.load_in_4bit",
            "load_in_8bit": "model.load_in_8bit"}
_AGGREGATIONS = {"dapo": "token", "bnpo": "token", "grpo": "sequence", "dr_grpo": "constant", "luspo": "sum"}
_GATED = ("cispo", "sapo", "vespo")  # losses without a clipped ratio, each with the average of its paper
_SCALES = {"group": "grpo", "true": "grpo", "batch": "batch_grpo", "none": "dr_grpo", "false": "dr_grpo"}
_LOADING_IDLE = ("device_map", "use_cache", "low_cpu_mem_usage")
_UNBOUNDED = 1 << 20  # tokens
LONGEST_PROMPT = 2048  # tokens, where the model has the positions: TRL has no limit


class TrlConfig:
    """Settings by TRL's names, with TRL's defaults; each is an attribute. The trainer tells what it does not take, all
    of a call at once."""

    FIELDS: ClassVar[Mapping[str, Field]] = {}

    def __init__(self, output_dir: str | None = None, **values: object) -> None:
        vars(self).update({name: field.default for name, field in self.FIELDS.items()}, given={})
        for name, value in (({} if output_dir is None else {"output_dir": str(output_dir)}) | values).items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        self.given[name] = vars(self)[name] = value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"

    def to_dict(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.FIELDS}

    def idle(self) -> list[str]:
        """The names that were given a value, which has no effect here."""
        return [name for name in self.given if name in self.FIELDS and self.FIELDS[name].kind == IDLE]

    def faults(self) -> list[str]:
        """A line for each name that TRL's class does not have, and for each value that is not taken here."""
        lines = []
        for name, value in self.given.items():
            field = self.FIELDS.get(name)
            if field is None:
                lines.append(f"{name}: {type(self).__name__} has no such field{nearest(name, self.FIELDS)}")
            elif field.kind == REFUSED and value != field.default and str(value) != str(field.default):
                lines.append(f"{name}={value!r:.60}: {field.note}")
        return lines


def is_config(value: object) -> bool:
    """Whether it is a configuration: one of these, or of TRL or transformers."""
    return isinstance(value, TrlConfig) or type(value).__name__ in (*trl_fields.CONFIGS, "TrainingArguments")


SFTConfig, DPOConfig, KTOConfig, RewardConfig, GRPOConfig, RLOOConfig, PPOConfig, GKDConfig = (
    type(name, (TrlConfig,), {"FIELDS": fields, "__module__": __name__, "__doc__": f"TRL's {name}."})
    for name, fields in trl_fields.CONFIGS.items())


class Known(NamedTuple):
    """What the meaning of a configuration depends on beside it. first: the first row. positions: the model's, None
    where they are unknown. size: rows of a step in one process, or prompts. updates: TRL's steps in one step here, as a
    rollout may be used several times. epoch, total: steps of an epoch, and updates of the run; None where the number of
    rows is not known."""

    first: Mapping
    positions: int | None
    size: int
    updates: int
    epoch: int | None
    total: int | None


def settings_of(config: TrlConfig, rows: object, positions: Callable[[], int | None]) -> tuple[dict, list[str]]:
    """The options that a configuration means, and a line for each value that is not taken.

    rows: the training rows, whose number and first columns some of TRL's defaults depend on. positions: gives the
    model's positions, None where they are unknown.
    """
    faults = config.faults()
    values = {field.option: value for name, field in config.FIELDS.items()
              if field.kind == TAKEN and (value := getattr(config, name)) is not None}
    parts = [_optimizer, _saving, _loading, _losses, _schedule, _data, _sampling]
    try:
        known = _known(config, rows, positions())
    except UserError as error:
        faults, parts = [*faults, str(error)], parts[:4]
        known = Known({}, None, 1, 1, None, None)
    for part in parts:
        try:
            values |= part(config, known)
        except UserError as error:
            faults.append(str(error))
    return values, faults


def _known(config: TrlConfig, rows: object, positions: int | None) -> Known:
    size, updates = rollout_size(config)
    world = int(os.environ.get("WORLD_SIZE", 1))
    epoch, first = None, _first(rows) if isinstance(rows, Iterable) and not isinstance(rows, (str, Mapping)) else None
    if first is None:
        first = _first_of_file(rows)
    elif isinstance(rows, Sized):
        epoch, rest = divmod(len(rows), size * world)
        if not config.FIELDS.keys() & {"num_generations", "response_length", "lmbda"}:
            epoch += bool(rest)  # stages that sample leave these out
        epoch = max(1, epoch)
    total = config.max_steps if config.max_steps > 0 else None
    if total is None and getattr(config, "total_episodes", None):
        total = math.ceil(config.total_episodes / (size * world))
    elif total is None and epoch is not None:
        total = max(1, math.ceil(epoch * config.num_train_epochs - 1e-9)) * updates
    return Known(first, positions, size, updates, epoch, total)


def _first(rows: Iterable) -> Mapping | None:
    """The first row of rows in memory; None for a list of paths or sources."""
    row = next(iter(rows), {})
    return row if isinstance(row, Mapping) and "path" not in row else None


def _first_of_file(rows: object) -> Mapping:
    """{} where it cannot be read, which is told where all are."""
    try:
        return next(iter(first_rows(as_sources(rows)[0], 1)[0]), {})
    except (UserError, OSError, LookupError):
        return {}


def _word(value: object) -> str:
    """A setting that may be one of transformers' enumerations, as its name."""
    return str(getattr(value, "value", value))


def rollout_size(config: TrlConfig) -> tuple[int, int]:
    """Rows of a step of one process (prompts of a rollout), and TRL's steps in it: it counts answers and updates."""
    size = config.per_device_train_batch_size * config.gradient_accumulation_steps
    if "num_generations" not in config.FIELDS:
        return size, 1
    answers = config.per_device_train_batch_size * (config.steps_per_generation or config.gradient_accumulation_steps)
    if config.generation_batch_size:
        world = int(os.environ.get("WORLD_SIZE", 1))
        check(config.steps_per_generation is None, "steps_per_generation and generation_batch_size are both given; "
                                                   "leave one of them out")
        check(config.generation_batch_size % world == 0,
              f"generation_batch_size is {config.generation_batch_size}; give a multiple of the {world} processes")
        answers = config.generation_batch_size // world
    check(answers % size == 0, f"generation_batch_size: {answers} answers of a process are not a multiple of the "
                               f"{size} of an update; give one that is")
    check(answers % config.num_generations == 0, f"per_device_train_batch_size: {answers} answers of a process are not "
          f"a multiple of num_generations={config.num_generations}; give one that is")
    return answers // config.num_generations, answers // size * config.num_iterations


def _optimizer(config: TrlConfig, known: Known) -> dict:
    schedule, optim = _word(config.lr_scheduler_type), _word(config.optim)
    check(schedule in _SCHEDULES, f"lr_scheduler_type={schedule!r}: there are {', '.join(_SCHEDULES)}")
    check(optim in _OPTIMIZERS, f"optim={optim!r}: there are {', '.join(_OPTIMIZERS)}")
    return {"train.lr_scheduler_type": schedule, "train.optim": _OPTIMIZERS[optim]}


def _schedule(config: TrlConfig, known: Known) -> dict:
    """Updates there are steps here, of several each where a rollout is used more than once."""

    def share(name: str, steps: float) -> float:
        """Steps as they are; a share of all of them as their number."""
        if steps >= 1:
            return steps
        check(known.total is not None, f"{name}={steps}: the number of rows is not known here; give a number of steps")
        return steps * known.total

    def every(name: str, when: str, steps: float) -> int:
        check(when != "epoch" or known.epoch is not None,
              f"{name}_strategy='epoch': the number of rows is not known here; write 'steps' and a number")
        return known.epoch if when == "epoch" else max(1, round(share(f"{name}_steps", steps) / known.updates))

    warmup = config.warmup_steps
    if warmup >= 1:
        check(known.total is not None, f"warmup_steps={warmup}: the number of rows is not known here; give max_steps, "
                                       "or a share such as warmup_steps=0.1")
        warmup = min(1.0, warmup / known.total)
    values = {"train.warmup_ratio": warmup, "train.logging_steps": every("logging", "steps", config.logging_steps)}
    if config.max_steps > 0:
        values["train.max_steps"] = math.ceil(config.max_steps / known.updates)
    for name, steps in (("eval", config.eval_steps or config.logging_steps), ("save", config.save_steps)):
        when = _word(getattr(config, f"{name}_strategy"))
        if when in ("steps", "epoch"):
            values[f"train.{name}_steps"] = every(name, when, steps)
    return values


def _saving(config: TrlConfig, known: Known) -> dict:
    values: dict[str, object] = {}
    if config.load_best_model_at_end or _word(config.save_strategy) == "best":
        metric = (config.metric_for_best_model or "loss").removeprefix("eval_").removeprefix("eval/")
        is_larger = not metric.endswith(SMALL_IS_GOOD)
        check(config.greater_is_better in (None, is_larger), f"greater_is_better={config.greater_is_better}: the best "
              f"{metric} is the {'largest' if is_larger else 'smallest'} here; leave it out, or take another metric")
        values["train.save_best"] = f"eval/{metric}"
    trackers = config.report_to if isinstance(config.report_to, (list, tuple)) else [config.report_to]
    check("all" not in trackers, "report_to='all'; write their names, such as report_to=['wandb']")
    values["report_to"] = [name for name in trackers if name not in (None, "none")]
    resume = config.resume_from_checkpoint
    if resume is not None:
        values["resume"] = "auto" if str(resume) == "True" else str(resume)
    return values


def _precision(config: TrlConfig) -> dict:
    check(not config.use_cpu or device().type == "cpu",
          "use_cpu=True, and the process has a card; write CUDA_VISIBLE_DEVICES= python script.py")
    check(not (config.bf16 and config.fp16), "bf16 and fp16 are both True; leave one of them out")
    if config.bf16 or config.fp16:
        return {"model.dtype": "bfloat16" if config.bf16 else "float16"}
    return {"model.dtype": "float32"} if config.given.get("bf16") is False else {}


def _loading(config: TrlConfig, known: Known) -> dict:
    values: dict[str, object] = {}
    if config.given.get("gradient_checkpointing"):
        values["model.gradient_checkpointing"] = True
    for name, value in (getattr(config, "model_init_kwargs", None) or {}).items():
        check(name in _LOADING or name in _LOADING_IDLE, f"model_init_kwargs: {name} is not taken here; there are "
                                                         f"{', '.join(_LOADING)}")
        if name in _LOADING and value is not None:
            values[_LOADING[name]] = str(value).removeprefix("torch.") if "dtype" in name else value
    if getattr(config, "activation_offloading", False):
        values["engine.offload"] = ["activations"]
    return values | _precision(config)


def _data(config: TrlConfig, known: Known) -> dict:
    """TRL keeps strings as they are, and trains all of a text and of a conversation."""
    values: dict[str, object] = {"data.raw": True}
    if {"image", "images"} & set(known.first):  # TRL trains what reads images too
        values["model.freeze_vision"] = False
    is_read = "max_length" in config.FIELDS and getattr(config, "lmbda", 0) < 1
    if is_read and not config.given.get("max_length"):  # TRL's default, or None: no limit
        limit = config.max_length or _UNBOUNDED
        values["data.max_length"] = min(limit, known.positions or limit)
    if "completion_only_loss" in config.FIELDS:
        only = "completion" in known.first and config.completion_only_loss is not False
        values["data.train_on"] = "response" if only or config.assistant_only_loss else "all"
    return values


def _losses(config: TrlConfig, known: Known) -> dict:
    if isinstance(config, DPOConfig):
        named = config.loss_type if isinstance(config.loss_type, (list, tuple)) else [config.loss_type]
        check(len(named) == 1 and named[0] in ("sigmoid", "ipo", "hinge"),
              f"loss_type={config.loss_type!r}: there are sigmoid, ipo and hinge, one at a time")
        return {"dpo.loss_type": named[0]}
    if isinstance(config, GRPOConfig):
        return _policy_losses(config)
    if isinstance(config, RLOOConfig):
        least, most = config.reward_clip_range or (None, None)
        return {"ppo.policy_loss": "ppo_sequence", "ppo.cliprange": config.epsilon, "ppo.min_score": least,
                "ppo.max_score": most}
    if isinstance(config, RewardConfig):
        return {"reward.center_coef": config.center_rewards_coefficient or 0.0}
    return {}


def stage_of(config: TrlConfig) -> str:
    """The stage of a GRPOConfig: how it scales rewards is a stage of its own here."""
    if config.multi_objective_aggregation == "normalize_then_sum":
        return "gdpo"
    scale = str(config.scale_rewards).lower()
    check(scale in _SCALES, f"scale_rewards={config.scale_rewards!r}: there are group, batch and none")
    return _SCALES[scale]


def _policy_losses(config: TrlConfig) -> dict:
    """The loss of a GRPOConfig, with the options that it reads."""
    loss, of_sequence = config.loss_type, config.importance_sampling_level == "sequence"
    check(loss in _AGGREGATIONS or loss in _GATED,
          f"loss_type={loss!r}: there are {', '.join((*_AGGREGATIONS, *_GATED))}")
    values: dict[str, object] = {"ppo.kl_bias_correction": config.use_bias_correction_kl} if config.beta else {}
    if loss in _AGGREGATIONS:
        values["ppo.cliprange"] = config.epsilon
        if config.epsilon_high is not None:
            values["ppo.cliprange_high"] = config.epsilon_high
        return values | {"ppo.aggregation": _AGGREGATIONS[loss], "ppo.policy_loss": "gspo" if of_sequence else "ppo"}
    check(not of_sequence, f"importance_sampling_level='sequence': loss_type={loss!r} has its own; leave it out")
    if loss == "cispo":
        check((config.epsilon_high or 0) > 1,
              "loss_type='cispo': epsilon_high is the bound of the ratio; give one above 1, such as 5.0")
        values["ppo.cliprange_high"] = config.epsilon_high - 1
    options = {f"ppo.{name}": getattr(config, name) for name in config.FIELDS if name.startswith(f"{loss}_")}
    return values | options | {"ppo.policy_loss": loss}


def _sampling(config: TrlConfig, known: Known) -> dict:
    """Of stages that sample: TRL counts answers and updates; here prompts and rollouts are counted."""
    fields, values = config.FIELDS, {"train.gradient_accumulation_steps": 1}
    scores = {"ppo.normalise_scores": False, "ppo.score_clip": None}  # as they are
    if "num_generations" in fields:
        sampled = config.max_completion_length
        values |= scores | {"ppo.missing_eos_penalty": 0.0,
                            "ppo.num_minibatches": known.updates // config.num_iterations}
        if config.top_p < 1 or config.top_k or config.min_p:
            values["ppo.replay_truncation"] = False  # ratios are of all tokens there
        if turns := getattr(config, "max_tool_calling_iterations", None):
            values["environment.max_turns"] = turns + 1  # theirs are those after the first
    elif "response_length" in fields:
        sampled = config.response_length
        check(known.size % config.num_mini_batches == 0, f"num_mini_batches is {config.num_mini_batches}, and a "
              f"process has {known.size} answers in a rollout; give a divisor of that")
        values |= scores | {"ppo.missing_eos_penalty": config.missing_eos_penalty or 0.0,
                            "roles.critic.learning_rate": config.learning_rate}
        if config.total_episodes:
            values["train.max_steps"] = known.total
    elif "lmbda" in fields:
        return _room(config.max_new_tokens, known) | {"distill.divergence": "jsd",
                                                      "distill.temperature": config.temperature}
    else:
        return {}
    return values | _room(sampled, known) | {"train.per_device_train_batch_size": known.size}


def _room(sampled: int, known: Known) -> dict:
    room = LONGEST_PROMPT if known.positions is None else min(LONGEST_PROMPT, known.positions - sampled)
    return {"data.max_prompt_length": room} if room >= 2 else {}  # else the run says that the answers are too long
