"""Stage 3: PPO of the stage-1 policy against the stage-2 reward model, functions, or both."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from hybrid_rlhf.config import UserError, check
from hybrid_rlhf.data import collate, datasets
from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.distributed import is_main, main_first, world_size
from hybrid_rlhf.engine import ZeroConfig
from hybrid_rlhf.layout import RolesConfig
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.rewards.model import ModelSource
from hybrid_rlhf.run import runfile
from hybrid_rlhf.run.export import export
from hybrid_rlhf.run.fit import TrainConfig, fit, on_record
from hybrid_rlhf.trainers.ppo import PPOConfig, PPOTrainer
from hybrid_rlhf.training import reward_sources, wiring
from hybrid_rlhf.training.four_roles import Parts, Sources, build, check_roles
from hybrid_rlhf.training.reward_sources import RewardConfig


@dataclass(frozen=True)
class Config:
    """Proximal policy optimisation.

    Attributes:
        stage: Name of the stage.
        output_dir: Folder of this run.
        seed: Seed of everything random.
        resume: auto (a finished run is left as it is) or never (start again).
        report_to: Trackers (tensorboard, wandb, trackio, ...).
        model: The actor; without a name, the finished sft run beside output_dir.
        data: The prompts.
        train: The schedule. A step is one rollout of per_device_train_batch_size prompts and its updates.
        engine: How training is laid out.
        roles: The four roles' own settings; their learning rates are here, train.learning_rate is not used.
        reward: What responses are paid by.
        ppo: PPO's own settings.
    """

    stage: str = "ppo"
    output_dir: str = "outputs/ppo"
    seed: int = 0
    resume: str = "auto"
    report_to: list[str] = field(default_factory=list)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    engine: ZeroConfig = field(default_factory=ZeroConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)

    def __post_init__(self) -> None:
        updates_per_step(self)  # refuses a minibatch that no rollout can fill
        critic, ref = self.roles.given("critic"), self.roles.given("ref")
        check(self.ppo.needs_critic or not critic,
              f"{', '.join(critic)}: ppo.estimator {self.ppo.estimator} has no critic; leave it out, or take gae")
        check(self.needs_reference or not ref,
              f"{', '.join(ref)}: ppo.kl_coef is 0, so no reference is loaded; leave it out, or name the reference "
              "that kl is to be measured against (roles.ref.model_name_or_path)")

    @property
    def needs_reference(self) -> bool:
        """Whether the KL to the reference has a price, or is asked for by naming one."""
        return self.ppo.kl_coef > 0 or self.roles.ref.model_name_or_path is not None


def find_sources(config: Config) -> Sources:
    """Every role's predecessor; UserError where one is missing or two do not fit together. Reads no weights."""
    check(config.model.preset is None, "model.preset: PPO starts from a trained model; give model.model_name_or_path "
                                       "or run --stage sft and --stage reward first")
    roles = config.roles
    actor = wiring.predecessor(roles.actor.model_name_or_path or config.model.model_name_or_path, config.output_dir,
                               "sft", "model.model_name_or_path")
    reward, own = None, config.model.tokenizer_name_or_path
    if config.reward.has_model(roles):
        reward = wiring.predecessor(roles.reward.model_name_or_path, config.output_dir, "reward",
                                    "roles.reward.model_name_or_path (or reward.functions instead of a model)")
    reads_text = reward not in (actor, None) and wiring.difference(actor, reward, config.data, "ppo", own)
    found = Sources(actor, reward, (roles.ref.model_name_or_path or actor) if config.needs_reference else None,
                    (roles.critic.model_name_or_path or (actor if reads_text or not reward else reward))
                    if config.ppo.needs_critic else None, bool(reads_text))
    for other in dict.fromkeys((found.ref, found.critic)):  # both of them read the actor's token ids
        if other not in (actor, reward, None):
            wiring.check_pair(actor, other, config.data, "ppo", own)
    check(not (reads_text and reward in (found.ref, found.critic)),
          f"{actor} and {reward} do not fit together: their {reads_text} differ, and a critic or reference reads the "
          "actor's tokens")
    return found


def actor_model(config: Config, sources: Sources) -> ModelConfig:
    return replace(config.model, model_name_or_path=wiring.model_folder(sources.actor))


def preview(config: Config) -> None:
    """Print rendered prompts."""
    from hybrid_rlhf.data.preview import preview as show

    wiring.require_data(config.data, "ppo")
    model = actor_model(config, find_sources(config))
    show(config.data, "ppo", wiring.open_tokenizer(model, config.data, "ppo", config.seed))


def open_reader(config: Config, sources: Sources):  # noqa: ANN201 - a transformers class
    """The reward model's tokenizer where it reads text, which is announced; None where it reads the actor's tokens."""
    if not sources.reads_text:
        return None
    if is_main():
        print(f"the reward model {sources.reward} has a tokenizer or template of its own and reads the responses as "
              f"text{f'; the critic starts from {sources.critic}' if sources.critic else ''}", file=sys.stderr)
    model = replace(config.model, model_name_or_path=wiring.model_folder(sources.reward), tokenizer_name_or_path=None)
    return wiring.open_tokenizer(model, config.data, "ppo", config.seed)


def parts_of(config: Config) -> Parts:
    return Parts(config.model, config.roles, config.engine, config.train, config.ppo.sampling.temperature, config.seed)


def run(config: Config, command: str = "") -> dict[str, float]:
    """Train, export the actor, and return the final metrics."""
    wiring.require_data(config.data, "ppo")
    done = runfile.finished(config.output_dir, "ppo", config)
    if done:
        return done.metrics
    wiring.seed_everything(config.seed)
    others = reward_sources.open_sources(config.reward, config.roles)
    sources = find_sources(config)
    model, sampling = actor_model(config, sources), config.ppo.sampling
    wiring.check_tensor_parallel(config.roles.actor.tp or 1, model)
    longest = config.data.max_prompt_length + sampling.max_new_tokens
    for path in dict.fromkeys(p for p in (sources.actor, sources.reward, sources.ref, sources.critic) if p):
        wiring.check_lengths(replace(model, model_name_or_path=wiring.model_folder(path)),
                             **{"data.max_prompt_length + ppo.sampling.max_new_tokens": longest})
    starts, layout = check_roles(parts_of(config), sources)
    tokenizer, reader = wiring.open_tokenizer(model, config.data, "ppo", config.seed), open_reader(config, sources)
    with main_first():  # the others find its tables in the cache
        data = datasets.build(config.data, "ppo", tokenizer, config.seed)
    reward_sources.check_columns(others, data.train[0])
    loader = wiring.train_loader(data.train, config.train, config.seed, collate.collate_prompts)
    held_out = wiring.eval_loader(data.held_out, config.train, config.seed, collate.collate_prompts)
    steps = wiring.total_steps(config.train, len(loader))
    mean, std = score_scale(config, sources)
    roles, reward = build(parts_of(config), starts, layout, tokenizer, steps * updates_per_step(config), (mean, std),
                          reader)
    source, mean, std = reward_sources.combine(config.reward, reward and ModelSource(reward, tokenizer=reader), others,
                                               mean, std)
    trainer = PPOTrainer(roles, source, config.ppo, seed=config.seed, score_mean=mean, score_std=std, more=loader.next)
    record = runfile.start(config.output_dir, "ppo", config, command)
    with on_record(record):  # a failing export is on the record too
        metrics = fit(trainer, loader, held_out, config.train, record, steps)
        with roles.actor.engine.active():
            export(roles.actor.engine.model, tokenizer, Path(config.output_dir) / wiring.MODEL_FOLDER,
                   roles.actor.engine.eos_ids)
        record.finish(metrics, tokenizer=tokenizer, base_model=sources.actor, reward_model=sources.reward,
                      data=data.report)
    return metrics


def score_scale(config: Config, sources: Sources) -> tuple[float, float]:
    """Mean and standard deviation that scores are normalised by; (0, 1) leaves them as they are."""
    found = wiring.score_statistics_of(sources.reward) if sources.reward and config.ppo.normalise_scores else {}
    return found.get("mean", 0.0), found.get("std", 1.0)


def updates_per_step(config: Config) -> int:
    """Optimizer steps of one trainer step; the schedules count these."""
    sequences = config.train.per_device_train_batch_size * config.train.gradient_accumulation_steps
    sequences *= config.ppo.sampling.num_samples * world_size()
    size = config.ppo.minibatch_size or -(-sequences // config.ppo.num_minibatches)
    if size > sequences:
        raise UserError(f"ppo.minibatch_size is {size}, but a step samples {sequences} sequences; lower it")
    if size % world_size():
        option = "ppo.minibatch_size" if config.ppo.minibatch_size else "ppo.num_minibatches"
        raise UserError(f"{option}: a minibatch of {size} of the step's {sequences} sequences does not divide by the "
                        f"{world_size()} processes; choose a multiple")
    return config.ppo.num_ppo_epochs * -(-sequences // size)
