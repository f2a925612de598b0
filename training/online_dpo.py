"""Online DPO of the stage-1 policy: pairs of its own samples, ranked by the reward sources."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from hybrid_rlhf.algorithms.preference import LOSSES
from hybrid_rlhf.trainers.offline import DPOConfig, OfflineTrainer
from hybrid_rlhf.trainers.online_preference import OnlineConfig, OnlinePreferenceTrainer
from hybrid_rlhf.training import on_policy, unread_options
from hybrid_rlhf.training.check_signal import check as check_signal_of
from hybrid_rlhf.training.registry import READS
from hybrid_rlhf.training.stage_config import OnPolicyConfig


@dataclass(frozen=True)
class Config(OnPolicyConfig):
    """Preference optimisation on fresh samples.

    Attributes:
        model: The policy, and the reference; without a name, the finished sft run beside output_dir.
        train: The schedule. A step is one round of sampling for per_device_train_batch_size prompts and one update.
        reward: What ranks the responses.
        online: How pairs are made.
        dpo: The loss and its settings.
    """

    stage: str = "online_dpo"
    output_dir: str = "outputs/online_dpo"
    online: OnlineConfig = field(default_factory=OnlineConfig)
    dpo: DPOConfig = field(default_factory=DPOConfig)

    def __post_init__(self) -> None:
        unread_options.refuse(self)

    @property
    def method(self) -> on_policy.Method:
        row = LOSSES[self.dpo.loss_type]
        return on_policy.Method(self.online.sampling, "online", 1, 2 * self.train.rows_per_step,
                                2 if row.needs_pairs else 1, needs_ref=row.needs_reference, reads=READS["online_dpo"])


previews = on_policy.previews


def _trainer(opened: on_policy.RunContext) -> OnlinePreferenceTrainer:
    config, roles = opened.config, opened.roles
    learner = OfflineTrainer(roles.actor, roles.ref, config.dpo)
    return OnlinePreferenceTrainer(roles, opened.source, learner, config.online, seed=config.seed,
                                   needs_pairs=LOSSES[config.dpo.loss_type].needs_pairs)


run = partial(on_policy.run, _trainer)
check_signal = partial(check_signal_of, _trainer)
