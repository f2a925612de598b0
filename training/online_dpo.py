"""Online DPO of the stage-1 policy: pairs of its own samples, ranked by the reward sources."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from hybrid_rlhf.algorithms.preference import LOSSES
from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.engine import ZeroConfig
from hybrid_rlhf.environments.open import EnvironmentConfig
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.roles.sharing import RolesConfig
from hybrid_rlhf.run.loop import TrainConfig
from hybrid_rlhf.trainers.offline import DPOConfig, OfflineTrainer
from hybrid_rlhf.trainers.online_preference import OnlineConfig, OnlinePreferenceTrainer
from hybrid_rlhf.training import on_policy, unread_options
from hybrid_rlhf.training.check_signal import check as check_signal_of
from hybrid_rlhf.training.registry import READS
from hybrid_rlhf.training.reward_sources import RewardConfig


@dataclass(frozen=True)
class Config:
    """Preference optimisation on fresh samples.

    Attributes:
        stage: Name of the stage.
        output_dir: Folder of this run.
        seed: Seed of everything random.
        resume: auto (a finished run is left as it is, an unfinished one goes on from its newest checkpoint),
            never (start again) or the path of one of its checkpoints.
        report_to: Trackers (tensorboard, wandb, trackio, ...).
        model: The policy, and the reference; without a name, the finished sft run beside output_dir.
        data: The prompts.
        train: The schedule. A step is one round of sampling for per_device_train_batch_size prompts and one update.
        engine: How training is laid out.
        roles: The roles' own settings; the learning rate is roles.actor's.
        reward: What ranks the responses.
        environment: Tools and environments, which make a response an episode of several turns.
        online: How pairs are made.
        dpo: The loss and its settings.
    """

    stage: str = "online_dpo"
    output_dir: str = "outputs/online_dpo"
    seed: int = 0
    resume: str = "auto"
    report_to: list[str] = field(default_factory=list)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    engine: ZeroConfig = field(default_factory=ZeroConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
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
