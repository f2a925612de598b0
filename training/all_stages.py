"""Run the three stages in order, in one process, and compare the models that they leave."""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hybrid_rlhf.core.config import check
from hybrid_rlhf.data import datasets
from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.data.preview import Preview, look
from hybrid_rlhf.engine import ZeroConfig
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.roles.sharing import RolesConfig
from hybrid_rlhf.run.loop import TrainConfig
from hybrid_rlhf.trainers.ppo import PPOConfig
from hybrid_rlhf.training import (
    builders,
    defaults,
    on_policy,
    reward_sources,
    stage_comparison,
    step1_sft,
    step2_reward,
    step3_ppo,
    unread_options,
)
from hybrid_rlhf.training.registry import READS
from hybrid_rlhf.training.step2_reward import RewardModelConfig

ORDER = ("sft", "reward", "ppo")
DEMO = Path(__file__).parent / "presets" / "demo.yaml"


@dataclass(frozen=True)
class StagesConfig:
    """The schedule of each stage.

    Attributes:
        sft: Stage 1.
        reward: Stage 2.
        ppo: Stage 3.
    """

    sft: TrainConfig = field(default_factory=TrainConfig)
    reward: TrainConfig = field(default_factory=TrainConfig)
    ppo: TrainConfig = field(default_factory=TrainConfig)


@dataclass(frozen=True)
class Config:
    """All three stages. Sections that several stages share (model, data, engine) are given once.

    Attributes:
        stage: Name of the stage.
        output_dir: Folder of the runs; each stage gets a folder of its own in it.
        seed: Seed of everything random.
        resume: auto (finished stages are left as they are, an unfinished one goes on) or never (start again).
        report_to: Trackers (tensorboard, wandb, trackio, ...).
        run_stages: The stages to run. Without sft, reward and ppo start from `model` as it is.
        model: The model to start from.
        data: The data; each source says by `stages` what it serves.
        engine: How training is laid out.
        stages: The schedule of each stage.
        reward: The reward model's own settings.
        roles: The four roles of PPO.
        reward_sources: PPO's reward sources beside the model of stage 2 (`reward` of stage ppo); that model comes
            first in reward_sources.weights. To do without it, leave reward out of run_stages.
        ppo: PPO's own settings.
        compare: The table at the end.
    """

    stage: str = "all"
    output_dir: str = "outputs/all"
    seed: int = 0
    resume: str = "auto"
    report_to: list[str] = field(default_factory=list)
    run_stages: list[str] = field(default_factory=lambda: list(ORDER))
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(split=[2.0, 4.0, 4.0]))
    engine: ZeroConfig = field(default_factory=ZeroConfig)
    stages: StagesConfig = field(default_factory=StagesConfig)
    reward: RewardModelConfig = field(default_factory=RewardModelConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    reward_sources: reward_sources.RewardConfig = field(default_factory=reward_sources.RewardConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    compare: stage_comparison.CompareConfig = field(default_factory=stage_comparison.CompareConfig)

    def __post_init__(self) -> None:
        unread_options.refuse(self)
        unknown = [s for s in self.run_stages if s not in ORDER]
        check(not unknown and bool(self.run_stages),
              f"run_stages is {self.run_stages}; choose one or more of {', '.join(ORDER)}")


def default_config(argv: list[str]) -> str | None:
    """The embedded demo, for a command line without a configuration, model or data."""
    if any(word.startswith(("--config", "--model", "--data", "--run_stages")) for word in argv):
        return None
    return str(DEMO)


def stage_configs(config: Config) -> dict[str, object]:
    """The settings of each stage to run, as its own recipe takes them."""
    recipes = {"sft": step1_sft, "reward": step2_reward, "ppo": step3_ppo}
    later = dataclasses.replace(config.model, preset=None, tokenizer_name_or_path=None)
    models = {"sft": config.model}
    if "sft" in config.run_stages:  # the later stages find the sft run beside them
        later = dataclasses.replace(later, model_name_or_path=None)
    out = {}
    for name in (s for s in ORDER if s in config.run_stages):
        fields = {f.name for f in dataclasses.fields(recipes[name].Config)}
        shared = {k: getattr(config, k) for k in fields if hasattr(config, k)}
        if name == "ppo":  # `reward` is stage 2's section here
            shared |= {"reward": config.reward_sources, "roles": _ppo_roles(config)}
        shared |= {"stage": name, "output_dir": str(Path(config.output_dir) / name),
                   "model": models.get(name, later), "train": getattr(config.stages, name)}
        out[name] = recipes[name].Config(**unread_options.without(name, shared))
    return out


def _ppo_roles(config: Config) -> RolesConfig:
    """PPO's roles, with the path of stage 2's model where other reward sources would otherwise replace it."""
    roles = config.roles
    if "reward" not in config.run_stages or config.reward_sources.has_model(roles):
        return roles
    path = str(Path(config.output_dir) / "reward")
    return dataclasses.replace(roles, reward=dataclasses.replace(roles.reward, model_name_or_path=path))


def previews(config: Config) -> Iterator[Preview]:
    """Rendered examples of every stage's data, all in stage 1's tokens."""
    for name in config.run_stages:
        tokenizer = builders.open_tokenizer(config.model, config.data, READS["sft"], config.seed)
        yield look(config.data, READS[name], tokenizer)


def check_all(config: Config, configs: dict[str, object]) -> None:
    """Raise before the first stage trains what a later one would refuse: missing data, lengths beyond the model."""
    lengths = {"data.max_length": min(each.data.max_length for each in (config, *configs.values()))}
    if "ppo" in configs:
        lengths["data.max_prompt_length + ppo.sampling.max_new_tokens"] = (
            config.data.max_prompt_length + config.ppo.sampling.max_new_tokens)
        reward_sources.open_sources(configs["ppo"].reward, configs["ppo"].roles)
        reward_sources.check_groups(configs["ppo"].reward, config.ppo.sampling.num_samples, "ppo.sampling.num_samples")
        on_policy.require_more_data(configs["ppo"])
        on_policy.check_more_data(configs["ppo"], config.model)
    for name in configs:
        builders.require_data(config.data, name)
        datasets.open_sources(config.data, READS[name])
    builders.check_lengths(config.model, **lengths)


def run(config: Config, command: str = "") -> dict:
    """Run the stages, then compare their models; returns the summary (also in output_dir/summary.json)."""
    recipes = {"sft": step1_sft, "reward": step2_reward, "ppo": step3_ppo}
    configs = {name: defaults.resolve(stage, config.model) for name, stage in stage_configs(config).items()}
    seconds = {}
    check_all(config, configs)
    for number, (name, stage) in enumerate(configs.items(), 1):
        print(f"\n== stage {number} of {len(configs)}: {name}", file=sys.stderr)
        start = time.perf_counter()
        recipes[name].run(stage, command)
        seconds[name] = time.perf_counter() - start
        gc.collect()
    if list(configs) != list(ORDER):
        return {"seconds": seconds}
    return stage_comparison.run(config, configs, seconds, command)
