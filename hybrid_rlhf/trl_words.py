"""What TRL's users write beside a configuration: arguments of trainers, peft's settings, methods of subclasses."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from functools import reduce

from hybrid_rlhf import trl_configs
from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.options import value_of, with_value
from hybrid_rlhf.models.peft_compat import usual_targets
from hybrid_rlhf.training.defaults import resolve
from hybrid_rlhf.training.registry import MAX_STEPS, STAGES
from hybrid_rlhf.trl_configs import TrlConfig, rollout_size
from hybrid_rlhf.trl_fields import LORA, LORA_IDLE

# Arguments of TRL's trainers that are refused, if they are not None -> what to write.
ARGUMENTS = {
    "reward_processing_classes": "a reward model brings its own tokenizer; leave it out",
    "optimizers": "write optim='adamw_8bit' (or another), learning_rate=... and lr_scheduler_type='linear'",
    "optimizer_cls_and_kwargs": "write optim='adamw_8bit' (or another)",
    "data_collator": "rows are made into tokens here; leave it out, or write a step of your own as "
                     "examples/custom_flow.py does",
    "compute_metrics": "held-out rows are measured by the stage's own metrics; for one of yours write it as a function "
                       "in reward_funcs, of weight 0 in reward_weights",
    "compute_loss_func": "write a step of your own as examples/custom_flow.py does",
    "preprocess_logits_for_metrics": "leave it out",
    "ref_model": "the reference is the model as it was before training; leave it out",
    "judge": "write reward__judge__model=FOLDER, or reward__judge__url=ADDRESS",
    "rollout_func": "write tools=[...] or environment_factory=..., or a step of your own as "
                    "examples/custom_flow.py does",
    "quantization_config": "write load_in_4bit=True (or load_in_8bit=True), and peft_config or model__lora__r=16",
}
# Classes of TRL that have another name here, or none.
_OTHERS = {"ModelConfig": "model_init_kwargs and peft_config", "TrlParser": "SFTConfig(...) or its like in the script",
           "ScriptArguments": "train_dataset", "DistillationConfig": "GKDConfig",
           "DistillationTrainer": "DistillTrainer", "PRMTrainer": "RewardTrainer",
           "OnlineDPOTrainer": "train.py --stage online_dpo", "ORPOTrainer": "DPOTrainer(loss_type='orpo')",
           "CPOTrainer": "DPOTrainer(loss_type='simpo')"}
# Methods of transformers' and TRL's trainers that nothing here would call.
_NEVER_CALLED = ("compute_loss", "training_step", "prediction_step", "_compute_loss", "_generate_and_score_completions",
                 "_calculate_rewards", "create_optimizer", "create_optimizer_and_scheduler", "create_scheduler",
                 "get_train_dataloader", "get_eval_dataloader", "evaluation_loop", "prediction_loop", "log",
                 "_prepare_dataset", "tokenize_row", "concatenated_forward", "get_batch_loss_metrics", "dpo_loss",
                 "_prepare_inputs", "_get_train_sampler", "_generate", "_generate_single_turn",
                 "_get_per_token_logps_and_entropies")


def faults(options: Mapping[str, object], model: object) -> list[str]:
    """A line for each argument of TRL's trainers that has another form here, or none."""
    return [f"{name} is not taken here; {ARGUMENTS[name]}" for name, value in options.items()
            if name in ARGUMENTS and value is not None and value != (None, None)
            and not (name == "ref_model" and _are_equal(value, model))]


def _are_equal(one: object, other: object) -> bool:
    """Whether both are models in memory, of the same weights."""
    if not (hasattr(one, "state_dict") and hasattr(other, "state_dict")):
        return False
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def raise_all(lines: list[str]) -> None:
    """UserError with all of them."""
    check(not lines, lines[0] if len(lines) == 1 else "\n  ".join(["these are not taken here:", *lines]))


def missing(name: str) -> str | None:
    """What to write in place of a class of TRL that this package does not have; None for any other name."""
    return f"hybrid_rlhf has no {name}; use {_OTHERS[name]}" if name in _OTHERS else None


def check_overridden(kind: type, base: type) -> None:
    """UserError for a subclass of a trainer with a method that nothing here would call."""
    above = (name for each in kind.__mro__ if not issubclass(base, each) for name in vars(each))
    for name in above:
        if name in _NEVER_CALLED and not hasattr(base, name):
            raise UserError(f"{kind.__name__}.{name} would never be called; use reward_funcs, callbacks or optim, or "
                            "write a step of your own as examples/custom_flow.py does")


def checked_stage(stage: str, variant: str, config: object) -> str:
    """The stage of the trainer of `stage` with this configuration: GRPO's ways to scale rewards are stages of their
    own. UserError for another trainer's configuration."""
    fits = {"sft": "SFTConfig", "reward": "RewardConfig", "dpo": "DPOConfig", "kto": "KTOConfig", "ppo": "PPOConfig",
            "rloo": "RLOOConfig", "distill": "GKDConfig", "grpo": "GRPOConfig"}[stage]
    kind = type(config)
    check(isinstance(config, getattr(trl_configs, fits)),
          f"args is a {kind.__module__}.{kind.__name__}; this trainer takes a {fits} of hybrid_rlhf")
    return trl_configs.stage_of(config) if variant == "grpo" else variant


def lora_options(peft_config: object, model_type: Callable[[], str | None] | None = None
                 ) -> tuple[dict[str, object], list[str]]:
    """A peft.LoraConfig as the options model.lora.*, by dotted names ({} for None), and a line for each changed field
    that is not an option here. model_type: in TRL's place, where peft chooses target_modules by the model's type, and
    dropout is 0."""
    if peft_config is None:
        return {}, []
    kind = type(peft_config)
    if kind.__name__ != "LoraConfig" or kind.__module__.split(".")[0] != "peft":
        return {}, [f"peft_config is a {kind.__name__}; give a peft.LoraConfig, or model__lora__r=16"]
    usual = kind()
    values = {f.name: getattr(peft_config, f.name) for f in dataclasses.fields(peft_config)}  # type: ignore[arg-type]
    lines = [f"peft_config: {name}={value!r:.60} is not taken here; leave it out (there are {', '.join(LORA)})"
             for name, value in values.items()
             if name not in LORA and name not in LORA_IDLE and value != getattr(usual, name)]
    modules = values["target_modules"]
    if modules is None and model_type is not None:
        modules = usual_targets(model_type())
    if modules is None:
        lines.append("peft_config leaves target_modules to peft's choice for the model; write "
                     "target_modules='all-linear', or a list of names")
    values["target_modules"] = sorted(modules) if isinstance(modules, set) else modules
    if model_type is not None and values["lora_dropout"]:
        print("peft_config: lora_dropout is 0 here", file=sys.stderr)
        values["lora_dropout"] = 0.0
    named = {f"model.lora.{ours}": values[theirs] for theirs, ours in LORA.items()
             if theirs != "lora_dropout" or values[theirs]}  # most stages have no such option; 0 is its default
    return named | {"model.freeze_vision": True}, lines  # adapters alone are trained


def check_ending(config: object) -> None:
    """What is wanted at the end is tried now: UserError where there is no login for the hub."""
    if not getattr(config, "push_to_hub", False):
        return
    import huggingface_hub

    try:
        huggingface_hub.HfApi().whoami()
    except Exception as error:  # no network, no token, one that is no longer valid
        raise UserError(f"push_to_hub: the hub cannot be reached or does not know you ({type(error).__name__}); run "
                        "`hf auth login`, or leave push_to_hub out") from error


def told(config: TrlConfig, stage: str, settings: object) -> list[str]:
    """Lines for the terminal: where TRL's defaults differ from the launcher's, and what has no effect here."""
    options = [option for option in STAGES[stage].defaults if option != MAX_STEPS]  # the `run:` line has the length
    usual = resolve(reduce(lambda config, option: with_value(config, option, None), options, settings))
    pairs = [(option, value_of(settings, option), value_of(usual, option)) for option in options]
    parts = [f"{option} {value:g} ({other:g})" for option, value, other in pairs if None not in (value, other)
             and value != other]
    lines = []
    if parts:
        lines.append(f"{type(config).__name__}, as in TRL (in brackets train.py's default): {', '.join(parts)}")
    per = rollout_size(config)[1]
    if per > 1 and config.max_steps > 0:
        lines.append(f"max_steps {config.max_steps} are updates: {math.ceil(config.max_steps / per)} rollouts of {per}")
    if idle := config.idle():
        lines.append(f"without effect here: {', '.join(idle)} (docs/coming-from.md#trl says why)")
    return lines
