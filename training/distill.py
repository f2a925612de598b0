"""On-policy distillation: the policy is moved towards a teacher on its own samples, on demonstrations, or on both."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from hybrid_rlhf.core.distributed import rank, world_size
from hybrid_rlhf.data import collate
from hybrid_rlhf.data.loader import Loader
from hybrid_rlhf.roles import Teacher
from hybrid_rlhf.trainers.distillation import DistillConfig, DistillTrainer
from hybrid_rlhf.training import on_policy, unread_options
from hybrid_rlhf.training.registry import DEMONSTRATIONS, READS
from hybrid_rlhf.training.stage_config import OnPolicyConfig


@dataclass(frozen=True)
class Config(OnPolicyConfig):
    """On-policy distillation.

    Attributes:
        model: The student; without a name, the finished sft run beside output_dir.
        data: The prompts, and with distill.lmbda below 1 the demonstrations.
        train: The schedule. A step is one round of per_device_train_batch_size prompts and its updates.
        roles: The roles' own settings. The teacher is roles.teacher; the learning rate is roles.actor's.
        reward: What scores the samples, for the report alone; nothing has to.
        distill: What is learned from the teacher.
    """

    stage: str = "distill"
    output_dir: str = "outputs/distill"
    distill: DistillConfig = field(default_factory=DistillConfig)

    def __post_init__(self) -> None:
        unread_options.refuse(self)

    @property
    def method(self) -> on_policy.Method:
        distill = self.distill
        return on_policy.Method(
            distill.sampling, "distill", distill.num_epochs * distill.num_minibatches, _minibatch_size(self),
            needs_ref=self.roles.ref.model_name_or_path is not None, has_entropy=True, reads=READS["distill"],
            also_reads=(DEMONSTRATIONS,) if distill.lmbda < 1 else (), needs_reward=False, needs_teacher=True,
            keeps_average=distill.teacher_ema is not None, is_own_teacher=distill.teacher_ema is not None,
            takes_head=distill.kind is not None and not distill.top_k, keep_candidates=distill.kind is None)


def _minibatch_size(config: Config) -> int:
    """Sequences of an optimizer step on a process."""
    return -(-config.train.rows_per_step * config.distill.sampling.num_samples // config.distill.num_minibatches)


previews = on_policy.previews


def _trainer(opened: on_policy.RunContext) -> DistillTrainer:
    return DistillTrainer(opened.roles, opened.source, opened.config.distill, seed=opened.config.seed,
                          demonstrations=_demonstrations(opened), averaged=_averaged_teacher(opened))


def _averaged_teacher(opened: on_policy.RunContext) -> Teacher | None:
    """The teacher that is the average of the student."""
    config, actor = opened.config, opened.roles.actor
    if config.distill.teacher_ema is None:
        return None
    tokens = config.roles.teacher.micro_batch_tokens or actor.max_tokens
    return Teacher(actor.engine, tokens, on_policy.teacher_prompt(config, opened.tokenizer))


def _demonstrations(opened: on_policy.RunContext) -> Loader | None:
    """The loader of demonstrations, with its own position."""
    config = opened.config
    if config.distill.lmbda == 1:
        return None
    return Loader(opened.more[DEMONSTRATIONS.stage].train, _minibatch_size(config),
                  lambda rows: collate.collate_sft(rows, opened.tokenizer.pad_token_id), config.seed, rank=rank(),
                  world=world_size())


run = partial(on_policy.run, _trainer)
