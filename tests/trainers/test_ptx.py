"""PTX: the pretraining loss in the actor's step, against plain torch; its stream, its scale, and that it does work."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from hybrid_rlhf.cli import main
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data.collate import collate_sft
from hybrid_rlhf.data.loader import Loader
from hybrid_rlhf.engine import OptimizerConfig, SamplingConfig, ZeroConfig
from hybrid_rlhf.roles import Actor, Reference, Roles
from hybrid_rlhf.trainers.ppo import PPOConfig, PPOTrainer
from tests.factories.stage_options import COMMON, PPO, WORDS, used
from tests.factories.tiny import save_tiny, tiny_tokenizer
from tests.factories.trainers import PROMPTS, SFT_ROWS, count_of, policy, settings

TEMPERATURE = 1.3


def mixing(max_tokens=8192, rate=1.0, optim="sgd", **changes):
    """A policy under plain gradient descent, so that a step is the gradient, with three texts to mix in."""
    config = settings(**({"estimator": "reinforce_pp", "whiten_advantages": True, "kl_coef": 0.0, "ptx_coef": 2.0,
                          "sampling": SamplingConfig(max_new_tokens=10, temperature=TEMPERATURE)} | changes))
    engines = [policy(0) for _ in range(2)]
    engines[0].prepare_training(OptimizerConfig(learning_rate=rate, optim=optim, max_grad_norm=1e9), lambda step: 1.0,
                                ZeroConfig())
    roles = Roles(Actor(engines[0], tiny_tokenizer(), max_tokens), Reference(engines[1], max_tokens))
    stream = Loader(SFT_ROWS, 3, lambda rows: collate_sft(rows, 0), seed=0) if config.ptx_coef else None
    return PPOTrainer(roles, count_of(42), config, seed=0, ptx=stream)


def plain_ptx_loss(model):
    """Cross-entropy of the marked tokens of SFT_ROWS, at temperature 1, row by row."""
    losses = []
    for row in SFT_ROWS:
        ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"], dtype=torch.bool)[1:]
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        losses.append(-logprobs[mask])
    return torch.cat(losses).mean()


def plain_policy_loss(model, rollout):
    """At ratio 1 the loss of the clipped surrogate has the gradient of -A log p, over all tokens."""
    total = 0
    for i in range(len(rollout)):
        prompt, answer = rollout.prompts.ids[i], rollout.response_ids[i][rollout.action_mask[i]]
        logits = model(torch.tensor([[*prompt, *answer.tolist()]])).logits[0, len(prompt) - 1: -1] / TEMPERATURE
        logprobs = logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]
        total = total - (rollout.advantages[i][rollout.action_mask[i]] * logprobs).sum()
    return total / rollout.action_mask.sum()


@pytest.mark.parametrize("max_tokens", [14, 8192])
@pytest.mark.parametrize("scale", ["fixed", "relative"])
def test_the_step_is_the_sum_of_both_losses_by_hand_whatever_the_token_budget(scale, max_tokens):
    trainer = mixing(max_tokens, ptx_scale=scale)
    model = trainer.roles.actor.engine.model
    twin = copy.deepcopy(model)
    metrics = trainer.step(PROMPTS).compute()
    ptx, rollout = plain_ptx_loss(twin), trainer.last_rollout
    coef = 2.0
    if scale == "relative":
        coef *= rollout.advantages[rollout.action_mask].abs().mean().item() / ptx.item()
    (plain_policy_loss(twin, rollout) + coef * ptx).backward()
    assert metrics["ptx/coef"] == pytest.approx(coef, rel=1e-4)
    assert metrics["ptx/loss"] == pytest.approx(ptx.item(), rel=1e-4)
    with torch.no_grad():
        for own, plain in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(own, plain - plain.grad, rtol=1e-3, atol=2e-4)


def test_who_goes_on_from_a_state_takes_up_the_stream_and_the_average():
    first, second = (mixing(num_minibatches=2, ema=True) for _ in range(2))
    first.step(PROMPTS)
    second.load_state(copy.deepcopy(first.state()))
    assert second.ptx.state() == first.ptx.state() != {"epoch": 0, "position": 0}
    for name, weight in first.average.weights().items():
        assert torch.equal(second.average.weights()[name], weight)


def test_a_coefficient_and_its_stream_belong_together():
    with pytest.raises(ValueError, match="without a pretraining stream"):
        PPOTrainer(mixing().roles, count_of(42), settings(ptx_coef=1.0), seed=0)
    for changes in ({"ptx_scale": "relative"}, {"ptx_batch_size": 4}):
        with pytest.raises(UserError, match=r"ppo.ptx_coef is 0; give it too"):
            PPOConfig(**changes)
    with pytest.raises(UserError, match=r"ptx_scale is 'relativ'.*did you mean relative"):
        PPOConfig(ptx_coef=1.0, ptx_scale="relativ")


def test_the_launcher_reads_the_texts_of_stage_ptx(tmp_path, capsys):
    for name, rows in {"prompts": [{"prompt": f"say {w}"} for w in WORDS],
                       "texts": [{"prompt": f"tell {w}", "completion": f"{w} it is"} for w in WORDS]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "pay.py").write_text("def short(completions, **_):\n    return [-len(c) / 100 for c in completions]\n")
    prompts, texts = (f"{{path: {tmp_path}/{n}.jsonl, stages: [{s}]}}" for n, s in (("prompts", "ppo"),
                                                                                   ("texts", "ptx")))
    words = ["--stage", "reinforce_pp", "--output_dir", f"{tmp_path}/out",
             *used("reinforce_pp", [*COMMON, "--ppo.ptx_coef", "1"]), *PPO[:4],
             f"--data.cache_dir={tmp_path}/cache", "--model.model_name_or_path", save_tiny(tmp_path / "base"),
             "--train.max_steps", "2", f"--reward.functions=['{tmp_path}/pay.py:short']"]
    assert main([*words, f"--data.sources=[{prompts}]"]) == 2
    assert "no data source for stage ptx" in capsys.readouterr().err
    assert main([*words, f"--data.sources=[{prompts}, {texts}]", "--preview"]) == 0
    assert "it is" in capsys.readouterr().out
    assert main([*words, f"--data.sources=[{prompts}, {texts}]"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["ptx/coef"] == 1 and rows[1]["ptx/loss"] < rows[0]["ptx/loss"]
    assert json.loads((tmp_path / "out" / "run.json").read_text())["facts"]["ptx_data"]["read"] == len(WORDS)


def test_the_plan_counts_texts_longer_than_the_samples(tmp_path, capsys):
    words = ["--stage", "reinforce_pp", "--plan", "--model.model_name_or_path", save_tiny(tmp_path / "base"),
             *used("reinforce_pp", COMMON), *PPO[:2], "--reward.functions=['builtin:length_penalty']"]
    needs = []
    for more in ([], ["--ppo.ptx_coef", "1", "--data.max_length", "200"]):
        assert main([*words, *more]) == 0
        line = next(x for x in capsys.readouterr().out.splitlines() if x.split()[:2] == ["actor", "logits"])
        needs.append(float(line.split()[-2]) * {"KiB": 1, "MiB": 1024}[line.split()[-1]])
    assert needs[1] > 10 * needs[0]
