"""Stage 2: a reward model from preference pairs, started from the stage-1 model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from hybrid_rlhf.core.distributed import print_main
from hybrid_rlhf.core.options import check_values, within
from hybrid_rlhf.data import collate, datasets
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.weights import identity
from hybrid_rlhf.roles import Reward
from hybrid_rlhf.trainers.reward import RewardTrainer
from hybrid_rlhf.training import builders, fixed_prompts, supervised, unread_options
from hybrid_rlhf.training.stage_config import StageConfig
from hybrid_rlhf.training.step2_reward import own_samples

FEW_STATISTICS = 16  # scores; the standard deviation of fewer is a guess
NUM_STATISTICS = 512  # pairs whose scores give the mean and spread that stage 3 normalises by


@dataclass(frozen=True)
class RewardModelConfig:
    """The reward model's own settings.

    Attributes:
        center_coef: Weight of (s_chosen + s_rejected)^2, which keeps scores near zero; 0 turns it off.
        head_std: Standard deviation of the new head's weights; null takes 1 / sqrt(hidden size + 1).
        own_samples: After the training, two models are trained on half of the pairs each, and the share of pairs of the
            starting model's own answers that both rank alike is measured over so many prompts, for stage 3 to report.
            It takes as long as the training did, and memory for a second one beside it; 0 leaves it out.
    """

    center_coef: float = within(0.01, "[0,")
    head_std: float | None = None
    own_samples: int = within(0, "[0,")

    def __post_init__(self) -> None:
        check_values(self, "reward.")


@dataclass(frozen=True)
class Config(StageConfig):
    """A reward model.

    Attributes:
        model: The model to start from; without a name, the finished sft run beside output_dir.
        data: The preference pairs.
        reward: The reward model's own settings.
    """

    stage: str = "reward"
    output_dir: str = "outputs/reward"
    reward: RewardModelConfig = field(default_factory=RewardModelConfig)

    def __post_init__(self) -> None:
        unread_options.refuse(self)


def start_model(config: Config) -> tuple[str, ModelConfig]:
    """The path of the stage-1 run or model, and the model settings that name its weights."""
    return supervised.start_from_sft(config, "a reward model")


def _collation(_config: Config, pad: int) -> tuple:
    return (lambda rows: collate.collate_pairs(rows, pad),) * 2


def _open(opened: supervised.Opened) -> supervised.Learner:
    config, tokenizer = opened.config, opened.tokenizer
    role = _open_role(opened)
    own_samples.announce(opened)
    scored = fixed_prompts.of_reward(role, tokenizer, opened.data, config.train.num_fixed_prompts)

    def facts() -> dict:
        measured = own_samples.agreement(opened, _open_role, role.engine.training.num_steps)
        return {"score_statistics": score_statistics(role, tokenizer, opened.data),
                "base_weights": identity(opened.model.model_name_or_path)} | measured

    return supervised.Learner(RewardTrainer(role, config.reward.center_coef), "reward", role.engine,
                              role.engine.module.model, [tokenizer.eos_token_id], scored, facts)


def _open_role(opened: supervised.Opened) -> Reward:
    """A reward model with a new head on the weights of the starting model, and its optimizer."""
    config, tokenizer = opened.config, opened.tokenizer
    model = builders.open_scalar(opened.model, tokenizer, new_head_std=config.reward.head_std,
                                 in_parts=config.engine.cuts_weights)
    builders.seed_dropout(config.seed)
    engine = builders.scalar_engine(model, tokenizer)
    supervised.prepare_training(engine, config, opened.steps)
    return Reward(engine, config.engine.micro_batch_tokens)


def score_statistics(role: Reward, tokenizer, data: datasets.StageData) -> dict:  # noqa: ANN001
    """Mean and standard deviation of the score over both sides of the held-out pairs.

    Stage 3 normalises by them. They come closest to those of the policy's own samples, which 1909.08593 normalises by:
    chosen answers alone vary less in score, so that the same KL penalty weighs less (docs/results/score_statistics.md).
    """
    rows, where = [data.held_out[i] for i in range(min(len(data.held_out), NUM_STATISTICS))], "held-out pairs"
    if 2 * len(rows) < FEW_STATISTICS:
        few, where = len(rows), "pairs, training ones among them"
        rows = [part[i] for part in (data.held_out, data.train) for i in range(len(part))][:NUM_STATISTICS]
        print_main(f"warning: stage ppo will normalise scores by the mean and spread of {len(rows)} {where}, for there "
                   f"are only {few} held-out pairs; raise data.eval_fraction or give more rows")
    scores = role.score(collate.collate_pairs(rows, tokenizer.pad_token_id).sequences)
    spread = float(scores.std(correction=0))
    return {"mean": float(scores.mean()), "std": spread if spread > 1e-6 else 1.0, "count": len(scores),
            "on": f"both answers of {where}"}


previews = partial(supervised.previews, start=start_model)
run = partial(supervised.run, start=start_model, collation=_collation, make=_open)
