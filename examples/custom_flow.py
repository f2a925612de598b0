"""A training step of one's own: python examples/custom_flow.py --config ... (the options of --stage ppo)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hybrid_rlhf.cli import main
from hybrid_rlhf.rewards import checked_scores
from hybrid_rlhf.trainers.flow import FlowTrainer
from hybrid_rlhf.training import on_policy, registry
from hybrid_rlhf.training.step3_ppo import Config, previews  # noqa: F401 - a stage is Config, previews and run


def step(roles, source, prompts, sampling, seed):  # noqa: ANN001, ANN201
    """REINFORCE with the mean of each prompt's samples as baseline, and a KL penalty in the reward."""
    with roles.actor.inference():
        rollout = roles.actor.generate(prompts.repeat(sampling.num_samples), sampling, seed)
    rollout.logprobs, rollout.ref_logprobs = rollout.sampled_logprobs, roles.ref.logprobs(rollout)  # (B, R)
    rollout.scores = checked_scores(source, rollout)  # (B,)
    penalty = 0.02 * ((rollout.logprobs - rollout.ref_logprobs) * rollout.action_mask).sum(1)
    rewards = (rollout.scores - penalty).view(-1, sampling.num_samples)
    rollout.advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1) * rollout.action_mask

    def loss_fn(scores, rows, totals):  # noqa: ANN001, ANN202
        return -(scores.logprobs * rows.advantages[rows.action_mask]).sum() / totals.num_actions, {}

    return rollout, roles.actor.update(rollout, loss_fn)


def run(config, command=""):  # noqa: ANN001, ANN201
    return on_policy.run(lambda opened: FlowTrainer(
        step, opened.roles, opened.source, config.ppo.sampling, config.seed), config, command)


if __name__ == "__main__":
    options = ("--ppo.estimator=grpo", "--ppo.sampling.num_samples=4")  # no critic, four samples of each prompt
    registry.STAGES["mine"] = registry.Stage(__name__, "a step of my own", "ppo", options)
    sys.exit(main(["--stage", "mine", *sys.argv[1:]]))
