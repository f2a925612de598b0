"""Rejection sampling of the stage-1 policy: the best of n responses by the reward sources, then SFT on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from hybrid_rlhf.trainers.rejection_sampling import RejectionConfig, RejectionTrainer
from hybrid_rlhf.training import on_policy, unread_options
from hybrid_rlhf.training.check_signal import check as check_signal_of
from hybrid_rlhf.training.registry import READS
from hybrid_rlhf.training.stage_config import OnPolicyConfig


@dataclass(frozen=True)
class Config(OnPolicyConfig):
    """Best of n, then SFT on it, in rounds.

    Attributes:
        model: The policy; without a name, the finished sft run beside output_dir.
        train: The schedule. A step is one round on per_device_train_batch_size prompts; max_steps is their number.
        reward: What chooses among the responses.
        rejection: How they are drawn, chosen and imitated.
    """

    stage: str = "rejection"
    output_dir: str = "outputs/rejection"
    rejection: RejectionConfig = field(default_factory=RejectionConfig)

    def __post_init__(self) -> None:
        unread_options.refuse(self)

    @property
    def method(self) -> on_policy.Method:
        settings = self.rejection
        return on_policy.Method(settings.sampling, "rejection", settings.num_epochs * settings.num_minibatches,
                                -(-self.train.rows_per_step // settings.num_minibatches), needs_ref=settings.measure_kl,
                                reads=READS["rejection"])


previews = on_policy.previews


def _trainer(opened: on_policy.RunContext) -> RejectionTrainer:
    return RejectionTrainer(opened.roles, opened.source, opened.config.rejection, seed=opened.config.seed)


run = partial(on_policy.run, _trainer)
check_signal = partial(check_signal_of, _trainer)
