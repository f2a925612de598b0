"""The schedule of a stage."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_rlhf.algorithms.schedule import KINDS
from hybrid_rlhf.core.config import check, nearest
from hybrid_rlhf.engine.train.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class TrainConfig:
    """The schedule of a stage.

    Attributes:
        learning_rate: Peak learning rate; null goes by the method, LoRA and the size of the model.
        weight_decay: AdamW's decay of matrices; norms and biases are never decayed.
        adam_beta1: Decay of the gradient's mean.
        adam_beta2: Decay of the gradient's square.
        adam_epsilon: Added to the root of the square.
        optim: adamw (fused), adamw_unfused, adamw_8bit (moments in 8 bits, bitsandbytes) or sgd.
        max_grad_norm: Gradients are scaled down to this norm.
        max_skipped_updates: An update whose loss or gradient is not finite is skipped and counted; so many in a row end
            the run, the batch saved for inspection.
        lr_scheduler_type: cosine, linear, constant or constant_with_warmup.
        warmup_ratio: Share of the optimizer steps during which the rate rises linearly.
        num_train_epochs: Passes over the data, a part of one too; a step begun is made. null goes by the method.
        max_steps: Number of steps; if positive it wins over num_train_epochs. -1 goes by the epochs, and where they are
            null too by the method.
        max_seconds: Stop after the step that reaches this time; null has no limit.
        per_device_train_batch_size: Rows (prompts for PPO) per process and accumulation step; null goes by the method.
        gradient_accumulation_steps: Multiplies the rows of an optimizer step.
        per_device_eval_batch_size: Rows per process in evaluation.
        logging_steps: Steps between two lines on the terminal, in samples.jsonl and in trackers; metrics.jsonl has
            every step.
        eval_steps: Steps between two evaluations; 0 evaluates at the end only.
        max_eval_batches: At most so many batches per evaluation; null takes all.
        num_fixed_prompts: So many held-out prompts (pairs for the reward stage) are answered before the first step and
            after the last, for the report and answers.jsonl; 0 asks nothing.
        save_steps: Steps between two checkpoints; 0 goes by save_minutes alone.
        save_minutes: Minutes after which the next step ends with a checkpoint, and never sooner than twenty times what
            the last one took to save; 0 saves at the end, when stopped and by save_steps only.
        save_total_limit: Checkpoints that are kept.
        save_best: Held-out metric, such as eval/loss, whose best checkpoint is kept too, in checkpoints/best; null
            keeps none. Of losses, perplexities and KLs the smallest is the best, of everything else the largest.
        max_failed_saves: So many checkpoints in a row that the disk refuses end the run; before, it is warned.
    """

    learning_rate: float | None = None
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    optim: str = "adamw"
    max_grad_norm: float = 1.0
    max_skipped_updates: int = 20
    lr_scheduler_type: str = "cosine"
    warmup_ratio: float = 0.03
    num_train_epochs: float | None = None
    max_steps: int = -1
    max_seconds: float | None = None
    per_device_train_batch_size: int | None = None
    gradient_accumulation_steps: int = 1
    per_device_eval_batch_size: int = 8
    logging_steps: int = 10
    eval_steps: int = 0
    max_eval_batches: int | None = None
    num_fixed_prompts: int = 4
    save_steps: int = 0
    save_minutes: float = 15.0
    save_total_limit: int = 2
    save_best: str | None = None
    max_failed_saves: int = 3

    def __post_init__(self) -> None:
        check(self.lr_scheduler_type in KINDS,
              f"train.lr_scheduler_type is {self.lr_scheduler_type!r}; choose one of {', '.join(KINDS)}"
              f"{nearest(self.lr_scheduler_type, KINDS)}")
        check(self.optim in OPTIMIZERS, f"train.optim is {self.optim!r}; choose {', '.join(OPTIMIZERS)}"
                                        f"{nearest(self.optim, OPTIMIZERS)}")
        for name in ("learning_rate", "weight_decay", "eval_steps", "save_steps", "save_minutes", "num_fixed_prompts"):
            check((getattr(self, name) or 0) >= 0, f"train.{name} is {getattr(self, name)}; it must not be negative")
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size",
                     "logging_steps", "save_total_limit", "max_failed_saves", "max_skipped_updates"):
            check(getattr(self, name) is None or getattr(self, name) >= 1,
                  f"train.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("max_grad_norm", "num_train_epochs"):
            check(getattr(self, name) is None or getattr(self, name) > 0,
                  f"train.{name} is {getattr(self, name)}; it must be positive")
        for name in ("adam_beta1", "adam_beta2"):
            check(0 <= getattr(self, name) < 1, f"train.{name} is {getattr(self, name)}; it must lie in [0, 1)")
        check(self.adam_epsilon > 0, f"train.adam_epsilon is {self.adam_epsilon}; it must be positive")
        check(self.max_steps == -1 or self.max_steps >= 1,
              f"train.max_steps is {self.max_steps}; it must be at least 1, or -1 to go by train.num_train_epochs")
        check(self.max_eval_batches is None or self.max_eval_batches >= 1,
              f"train.max_eval_batches is {self.max_eval_batches}; it must be at least 1, or null for all")
        check(0 <= self.warmup_ratio <= 1, f"train.warmup_ratio is {self.warmup_ratio}; it must lie in [0, 1]")
        check(self.save_best is None or (self.save_best.startswith("eval/") and len(self.save_best) > 5),
              f"train.save_best is {self.save_best!r}; give the name of a held-out metric, such as eval/loss")
        check(self.max_seconds is None or self.max_seconds > 0,
              f"train.max_seconds is {self.max_seconds}; it must be positive, or null")

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step (prompts of a rollout) on one process."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps
