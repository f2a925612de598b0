"""The schedule of a stage."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_rlhf.algorithms.schedule import KINDS
from hybrid_rlhf.core.errors import check
from hybrid_rlhf.core.options import check_values, one_of, within
from hybrid_rlhf.engine.train.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class TrainConfig:
    """The schedule of a stage.

    Attributes:
        learning_rate: Peak learning rate; null chooses it by the method, LoRA and the size of the model.
        weight_decay: AdamW's decay of matrices; norms and biases are never decayed.
        adam_beta1: Decay of the gradient's mean.
        adam_beta2: Decay of the gradient's square.
        adam_epsilon: Added to the root of the square.
        optim: adamw (fused), adamw_unfused, adamw_8bit (moments in 8 bits, bitsandbytes) or sgd.
        max_grad_norm: Gradients are scaled down to this norm.
        max_skipped_updates: An update whose loss or gradient is not finite is skipped and counted; so many in a row end
            the run, with the batch saved for inspection.
        lr_scheduler_type: cosine, linear, constant or constant_with_warmup.
        warmup_ratio: Share of the optimizer steps during which the rate rises linearly.
        num_train_epochs: Passes over the data, may be a fraction (rounded up to a step). null: the method's default.
        max_steps: Number of steps; if positive it takes precedence over num_train_epochs. -1: by num_train_epochs, and
            if that is null too the method's default.
        max_seconds: Stop after the step that reaches this time; null has no limit.
        per_device_train_batch_size: Rows (prompts for PPO) per process and accumulation step; null: the method's
            default.
        gradient_accumulation_steps: Multiplies the rows of an optimizer step.
        per_device_eval_batch_size: Rows per process in evaluation.
        logging_steps: Steps between two lines on the terminal, in samples.jsonl and in trackers; metrics.jsonl has
            every step. null: 10, or a tenth of a run of fewer than 100.
        eval_steps: Steps between two evaluations; 0 evaluates at the end only.
        max_eval_batches: At most so many batches per evaluation; null takes all.
        num_fixed_prompts: So many held-out prompts (pairs for the reward stage) are answered before the first step and
            after the last, for the report and answers.jsonl; 0: none.
        save_steps: Steps between two checkpoints; 0: by save_minutes alone.
        save_minutes: Minutes after which the next step ends with a checkpoint, and never sooner than twenty times what
            the last one took to save; 0 saves at the end, when stopped and by save_steps only.
        save_total_limit: Checkpoints that are kept.
        save_best: Held-out metric, such as eval/loss, whose best checkpoint is kept too, in checkpoints/best; null
            keeps none. Of losses, perplexities and KLs the smallest is the best, of everything else the largest.
        max_failed_saves: So many failed checkpoints in a row end the run; before, each prints a warning.
        deterministic: On a card, kernels that add in one order, where torch has them, and decode steps of one number of
            rows, so that the same command gives the same bits; slower. A CPU's do in any case.
    """

    learning_rate: float | None = within(None, "[0,")
    weight_decay: float = within(0.0, "[0,")
    adam_beta1: float = within(0.9, "[0, 1)")
    adam_beta2: float = within(0.999, "[0, 1)")
    adam_epsilon: float = within(1e-8, "(0,")
    optim: str = one_of("adamw", OPTIMIZERS)
    max_grad_norm: float = within(1.0, "(0,")
    max_skipped_updates: int = within(20, "[1,")
    lr_scheduler_type: str = one_of("cosine", KINDS)
    warmup_ratio: float = within(0.03, "[0, 1]")
    num_train_epochs: float | None = within(None, "(0,")
    max_steps: int = -1
    max_seconds: float | None = within(None, "(0,")
    per_device_train_batch_size: int | None = within(None, "[1,")
    gradient_accumulation_steps: int = within(1, "[1,")
    per_device_eval_batch_size: int = within(8, "[1,")
    logging_steps: int | None = within(None, "[1,")
    eval_steps: int = within(0, "[0,")
    max_eval_batches: int | None = within(None, "[1,")
    num_fixed_prompts: int = within(4, "[0,")
    save_steps: int = within(0, "[0,")
    save_minutes: float = within(15.0, "[0,")
    save_total_limit: int = within(2, "[1,")
    save_best: str | None = None
    max_failed_saves: int = within(3, "[1,")
    deterministic: bool = False

    def __post_init__(self) -> None:
        check_values(self, "train.")
        check(self.max_steps == -1 or self.max_steps >= 1,
              f"train.max_steps is {self.max_steps}; it must be at least 1, or -1 to go by train.num_train_epochs")
        check(self.save_best is None or (self.save_best.startswith("eval/") and len(self.save_best) > 5),
              f"train.save_best is {self.save_best!r}; give the name of a held-out metric, such as eval/loss")

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step (prompts of a rollout) on one process."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps
