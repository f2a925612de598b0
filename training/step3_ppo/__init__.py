"""Stage 3: PPO of the stage-1 policy against the stage-2 reward model, functions, or both."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import rank, world_size
from hybrid_rlhf.data import collate
from hybrid_rlhf.data.loader import Loader
from hybrid_rlhf.trainers.ppo import PPOConfig, PPOTrainer
from hybrid_rlhf.trainers.ppo_config import DistillTerm
from hybrid_rlhf.training import on_policy, unread_options
from hybrid_rlhf.training.check_signal import check as check_signal_of
from hybrid_rlhf.training.registry import PTX
from hybrid_rlhf.training.stage_config import OnPolicyConfig


@dataclass(frozen=True)
class Config(OnPolicyConfig):
    """Proximal policy optimisation.

    Attributes:
        model: The actor; without a name, the finished sft run beside output_dir.
        train: The schedule. A step is one rollout of per_device_train_batch_size prompts and its updates.
        roles: The roles' own settings; their learning rates are here.
        reward: The reward sources.
        ppo: PPO's own settings.
        distill: A teacher beside the rewards.
    """

    stage: str = "ppo"
    output_dir: str = "outputs/ppo"
    ppo: PPOConfig = field(default_factory=PPOConfig)
    distill: DistillTerm = field(default_factory=DistillTerm)

    def __post_init__(self) -> None:
        if all(n is not None for n in (self.train.per_device_train_batch_size, self.ppo.num_ppo_epochs,
                                       self.ppo.num_minibatches)):
            updates_per_step(self)  # raises for a minibatch larger than a rollout
        unread_options.refuse(self)

    @property
    def needs_reference(self) -> bool:
        """Whether there is a KL penalty, or a named reference asks for the KL to be measured."""
        return self.ppo.kl_coef != 0 or self.roles.ref.model_name_or_path is not None

    @property
    def method(self) -> on_policy.Method:
        ppo, sequences = self.ppo, self.train.rows_per_step * self.ppo.sampling.num_samples
        return on_policy.Method(
            ppo.sampling, "ppo", updates_per_step(self), ppo.minibatch_size or -(-sequences // ppo.num_minibatches),
            needs_ref=self.needs_reference, needs_critic=ppo.needs_critic,
            normalise_scores=ppo.normalise_scores, score_clip=ppo.score_clip,
            critic_warmup_steps=ppo.critic_warmup_steps, has_entropy=True, also_reads=(PTX,) if ppo.ptx_coef else (),
            keeps_average=ppo.ema, needs_teacher=self.distill.coef > 0, takes_head=not self.distill.top_k,
            keep_candidates=ppo.replay_truncation)


previews = on_policy.previews


def _trainer(opened: on_policy.RunContext) -> PPOTrainer:
    config = opened.config
    ppo = replace(config.ppo, critic_warmup_steps=opened.critic_warmup_steps)
    return PPOTrainer(opened.roles, opened.source, ppo, seed=config.seed, scale=opened.scale,
                      extra_prompts=opened.loader.next, ptx=_pretraining(opened),
                      distill=config.distill)


def _pretraining(opened: on_policy.RunContext) -> Loader | None:
    """The loader of the texts that PTX mixes in, with its own position."""
    config = opened.config
    if not config.ppo.ptx_coef:
        return None
    size = config.ppo.ptx_batch_size or -(-_minibatch_size(config) // world_size())
    return Loader(opened.more["ptx"].train, size, lambda rows: collate.collate_sft(rows, opened.tokenizer.pad_token_id),
                  config.seed, rank=rank(), world=world_size())


def _minibatch_size(config: Config) -> int:
    """Sequences per optimizer step, over all processes."""
    sequences = config.train.rows_per_step * config.ppo.sampling.num_samples * world_size()
    return config.ppo.minibatch_size or -(-sequences // config.ppo.num_minibatches)


def updates_per_step(config: Config) -> int:
    """Optimizer steps per trainer step; learning rate schedules count these."""
    sequences = config.train.rows_per_step * config.ppo.sampling.num_samples * world_size()
    size = _minibatch_size(config)
    if size > sequences:
        raise UserError(f"ppo.minibatch_size is {size}, but a step samples {sequences} sequences; lower it")
    if size % world_size():
        option = "ppo.minibatch_size" if config.ppo.minibatch_size else "ppo.num_minibatches"
        raise UserError(f"{option}: a minibatch of {size} of the step's {sequences} sequences does not divide by the "
                        f"{world_size()} processes; choose a multiple")
    return config.ppo.num_ppo_epochs * -(-sequences // size)


run = partial(on_policy.run, _trainer)
check_signal = partial(check_signal_of, _trainer)
