"""The options of a stage that a newcomer should see first, in the order in which they are shown."""

from __future__ import annotations

from hybrid_rlhf.training.registry import STAGES, By, Rate

_MODEL = ("model.lora.r", "model.load_in_4bit", "model.gradient_checkpointing")
_SCHEDULE = ("train.learning_rate", "train.num_train_epochs", "train.max_steps", "train.per_device_train_batch_size")
_TEXTS = (*_SCHEDULE, *_MODEL, "data.max_length", "train.eval_steps", "seed")
_SAMPLED = ("train.max_steps", "train.per_device_train_batch_size", *_MODEL, "data.max_prompt_length")
# base stage -> options; those that a variant does not read are left out for it
_COMMON: dict[str, tuple[str, ...]] = {
    "sft": (*_TEXTS, "data.packing"),
    "reward": _TEXTS,
    "dpo": ("dpo.beta", *_TEXTS),
    "ppo": ("roles.actor.learning_rate", "roles.critic.learning_rate", *_SAMPLED, "ppo.sampling.max_new_tokens",
            "ppo.sampling.num_samples", "ppo.sampling.temperature", "ppo.kl_coef", "seed"),
    "online_dpo": ("roles.actor.learning_rate", "dpo.beta", *_SAMPLED, "online.sampling.max_new_tokens",
                   "online.sampling.num_samples", "online.sampling.temperature", "seed"),
    "rejection": ("roles.actor.learning_rate", *_SAMPLED, "rejection.sampling.max_new_tokens",
                  "rejection.sampling.num_samples", "rejection.sampling.temperature", "seed"),
    "distill": ("roles.actor.learning_rate", *_SAMPLED, "distill.divergence", "distill.lmbda",
                "distill.sampling.max_new_tokens", "distill.sampling.temperature", "seed"),
    "all": ("stages.sft.num_train_epochs", "stages.reward.num_train_epochs", "stages.ppo.max_steps", *_MODEL,
            "data.max_length", "data.max_prompt_length", "data.split", "ppo.sampling.max_new_tokens",
            "ppo.sampling.temperature", "ppo.kl_coef", "seed"),
    "evaluate": ("evaluate.num_prompts", "evaluate.sampling.max_new_tokens", "evaluate.sampling.temperature",
                 "data.max_prompt_length", "seed"),
}
_NOT_OF = {"roles.critic.learning_rate": ("ppo",)}  # whose variants have no critic


def common_options(stage: str) -> tuple[str, ...]:
    """Dotted names; of a stage that is not in the registry KeyError."""
    row = STAGES[stage]
    base = "sft" if stage == "conditional_sft" else row.base or stage
    return tuple(name for name in _COMMON[base] if stage in _NOT_OF.get(name, (stage,)))


def by_table(stage: str, option: str) -> str | None:
    """What a stage goes by where an option is not given, if the table of training/registry.py says it."""
    if stage == "all":  # whose stages have the options of their own
        _, method, name = option.split(".") if option.startswith("stages.") else ("", "ppo", option)
        stage, option = method, f"train.{name}" if option.startswith("stages.") else name
    value = STAGES[stage].defaults.get(option)
    if isinstance(value, Rate):
        return f"{value.lora:g} for adapters, {value.full:g} for all weights"
    if isinstance(value, By):
        return f"depends on {value.what}"
    return None if value is None else f"{value:g}"
