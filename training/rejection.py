"""Rejection sampling of the stage-1 policy: the best of n responses by the reward sources, then SFT on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.engine import ZeroConfig
from hybrid_rlhf.environments.open import EnvironmentConfig
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.roles.sharing import RolesConfig
from hybrid_rlhf.run.loop import TrainConfig
from hybrid_rlhf.trainers.rejection_sampling import RejectionConfig, RejectionTrainer
from hybrid_rlhf.training import on_policy, unread_options
from hybrid_rlhf.training.check_signal import check as check_signal_of
from hybrid_rlhf.training.registry import READS
from hybrid_rlhf.training.reward_sources import RewardConfig


@dataclass(frozen=True)
class Config:
    """Best of n, then SFT on it, in rounds.

    Attributes:
        stage: Name of the stage.
        output_dir: Folder of this run.
        seed: Seed of everything random.
        resume: auto (a finished run is left as it is, an unfinished one goes on from its newest checkpoint),
            never (start again) or the path of one of its checkpoints.
        report_to: Trackers (tensorboard, wandb, trackio, ...).
        model: The policy; without a name, the finished sft run beside output_dir.
        data: The prompts.
        train: The schedule. A step is one round on per_device_train_batch_size prompts; max_steps is their number.
        engine: How training is laid out.
        roles: The roles' own settings; the learning rate is roles.actor's.
        reward: What chooses among the responses.
        environment: Tools and environments, which make a response an episode of several turns.
        rejection: How they are drawn, chosen and imitated.
    """

    stage: str = "rejection"
    output_dir: str = "outputs/rejection"
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
