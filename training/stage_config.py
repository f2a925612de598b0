"""Settings that stages share; each stage's Config adds the sections of its method."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.engine import ZeroConfig
from hybrid_rlhf.environments.open import EnvironmentConfig
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.roles.sharing import RolesConfig
from hybrid_rlhf.run.loop import TrainConfig
from hybrid_rlhf.training.reward_sources import RewardConfig


@dataclass(frozen=True)
class StageConfig:
    """A stage that trains.

    Attributes:
        stage: Name of the stage.
        output_dir: Folder of this run.
        seed: Seed of everything random.
        resume: auto (a finished run is left as it is, an unfinished one goes on from its newest checkpoint),
            never (start again) or the path of one of its checkpoints.
        report_to: Trackers (tensorboard, wandb, trackio, ...).
        run_name: Name of the run in them; null takes the stage's.
        train: The schedule.
        engine: How training is laid out.
    """

    stage: str = ""
    output_dir: str = ""
    seed: int = 0
    resume: str = "auto"
    report_to: list[str] = field(default_factory=list)
    run_name: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    engine: ZeroConfig = field(default_factory=ZeroConfig)


@dataclass(frozen=True)
class OnPolicyConfig(StageConfig):
    """A stage that samples. Those that train have a property `method`, an on_policy.Method.

    Attributes:
        data: The prompts.
        roles: The roles' own settings; the learning rate is roles.actor's.
        environment: Tools and environments, which make a response an episode of several turns.
    """

    roles: RolesConfig = field(default_factory=RolesConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
