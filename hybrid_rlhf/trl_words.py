"""Arguments of TRL's trainers as settings of a stage here; or what to write instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from hybrid_rlhf.core.config import UserError, check

# Arguments of TRL's trainers, and options of their configurations, that mean nothing here -> what to write.
INSTEAD = {
    "args": "write its options beside the model: learning_rate=1e-6, max_steps=20; docs/coming-from.md has the names",
    "processing_class": "the tokenizer is the one in the model's folder; for another write "
                        "model__tokenizer_name_or_path=FOLDER, for another template data__chat_template=FILE",
    "reward_processing_classes": "a reward model brings its own tokenizer; leave it out",
    "callbacks": "after training .history has every step; report_to=['wandb'] sends them while it runs, and save_best, "
                 "eval_steps and max_seconds are options",
    "optimizers": "write optim='adamw_8bit' (or another), learning_rate=... and lr_scheduler_type='linear'",
    "optimizer_cls_and_kwargs": "write optim='adamw_8bit' (or another)",
    "data_collator": "rows are made into tokens here; leave it out, or write a step of your own as "
                     "examples/custom_flow.py does",
    "compute_metrics": "held-out rows are measured by the stage's own metrics; for one of yours write it as a function "
                       "in reward_funcs, of weight 0 in reward_weights",
    "compute_loss_func": "write a step of your own as examples/custom_flow.py does",
    "preprocess_logits_for_metrics": "leave it out",
    "formatting_func": "give rows of prompt and completion, of messages, or of text, such as "
                       "[{'prompt': ..., 'completion': ...}]",
    "ref_model": "the reference is the model as it was before training; for another write "
                 "roles__ref__model_name_or_path=FOLDER",
    "reward_model": "write reward_funcs=FOLDER (or an earlier RewardTrainer)",
    "value_model": "the critic starts from the reward model; for another write "
                   "roles__critic__model_name_or_path=FOLDER",
    "judge": "write reward__judge__model=FOLDER, or reward__judge__url=ADDRESS",
    "rollout_func": "write tools=[...] or environment_factory=..., or a step of your own as "
                    "examples/custom_flow.py does",
    "quantization_config": "write load_in_4bit=True (or load_in_8bit=True), and peft_config or model__lora__r=16",
    "model_init_kwargs": "write dtype='bfloat16', attn_implementation='sdpa' and their like beside the model",
    "bf16": "write dtype='bfloat16'",
    "fp16": "write dtype='float16'",
    "eval_strategy": "write eval_steps=10; with 0, the default, held-out rows are evaluated at the end",
    "save_strategy": "write save_steps=10; a checkpoint is also made every save_minutes, and at the end",
    "warmup_steps": "write warmup_ratio, the share of all steps",
    "load_best_model_at_end": "write save_best='eval/loss' (or another held-out metric)",
    "log_completions": "samples are always kept, in samples.jsonl and in the report; leave it out",
    "use_vllm": "the model that is trained samples, and nothing is to be started; leave it out",
    "push_to_hub": "call .push_to_hub(ID) after training",
}
# Classes of TRL that are imported beside its trainers, without those whose names are classes of ours.
_CONFIGS = ("SFTConfig", "GRPOConfig", "RLOOConfig", "KTOConfig", "DistillationConfig", "GKDConfig")
_TRAINERS = {"DistillationTrainer": "DistillTrainer", "GKDTrainer": "DistillTrainer", "PRMTrainer": "RewardTrainer",
             "OnlineDPOTrainer": "train.py --stage online_dpo", "ORPOTrainer": "DPOTrainer(loss_type='orpo')",
             "CPOTrainer": "DPOTrainer(loss_type='simpo')"}
# Fields of peft.LoraConfig that are options here, and those without effect on what is trained.
_LORA = {"r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "target_modules"}
_NO_MATTER = ("task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "inference_mode",
              "runtime_config", "megatron_core")


def refuse(options: Iterable[str]) -> None:
    """UserError for an argument of TRL's trainers that has another form here, or none."""
    for name in options:
        check(name not in INSTEAD, f"{name} is not taken here; {INSTEAD.get(name)}")


def missing(name: str) -> str | None:
    """What to write in place of a class of TRL that this package does not have; None for any other name."""
    if name in _CONFIGS:
        return f"hybrid_rlhf has no {name}: {INSTEAD['args']}"
    return f"hybrid_rlhf has no {name}; use {_TRAINERS[name]}" if name in _TRAINERS else None


def lora_options(peft_config: object) -> dict[str, object]:
    """A peft.LoraConfig as the options model.lora.*, by dotted names; {} for None. UserError for anything else, and for
    a changed field that is not an option here."""
    if peft_config is None:
        return {}
    kind = type(peft_config)
    check(kind.__name__ == "LoraConfig" and kind.__module__.split(".")[0] == "peft",
          f"peft_config is a {kind.__name__}; give a peft.LoraConfig, or model__lora__r=16")
    usual = kind()
    values = {f.name: getattr(peft_config, f.name) for f in dataclasses.fields(peft_config)}  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in _LORA and name not in _NO_MATTER and value != getattr(usual, name):
            raise UserError(f"peft_config: {name}={value!r:.60} is not taken here; leave it out "
                            f"(there are {', '.join(_LORA)})")
    modules = values["target_modules"]
    check(modules is not None, "peft_config leaves target_modules to peft's choice for the model; write "
                               "target_modules='all-linear', or a list of names")
    values["target_modules"] = sorted(modules) if isinstance(modules, set) else modules
    return {f"model.lora.{ours}": values[theirs] for theirs, ours in _LORA.items()
            if theirs != "lora_dropout" or values[theirs]}  # most stages have no such option, and 0 is its default
