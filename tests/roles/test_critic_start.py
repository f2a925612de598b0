"""A critic without a reward model begins at the mean score, and is trained alone until it knows something."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.cli import main
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.roles import Critic, Roles
from hybrid_rlhf.roles.sharing import Start
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.training import on_policy
from tests.factories.tiny import own_cache, save_tiny, tiny_scalar_model
from tests.factories.trainers import PROMPTS, Source, ppo, settings, trained


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("critic")
    save_tiny(folder / "base")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(40)))
    (folder / "pay.py").write_text("def words(completions, **_):\n    return [50 + len(c) for c in completions]\n")
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        yield folder


@pytest.mark.slow
def test_a_new_critic_values_everything_at_the_mean_score_and_warms_up_for_a_tenth_of_the_run(place, capsys):
    out = place / "run"
    assert main(["--stage", "ppo", "--output_dir", str(out), "--model.model_name_or_path", f"{place}/base",
                 "--model.dtype", "float32", "--data.sources", f"[{{path: {place}/prompts.jsonl}}]", "--data.split",
                 "null", "--data.eval_fraction", "0", "--data.max_prompt_length", "32", "--reward.functions",
                 f"{place}/pay.py:words", "--train.max_steps", "10", "--train.per_device_train_batch_size", "4",
                 "--ppo.sampling.max_new_tokens", "4", "--train.num_fixed_prompts", "0", "--model.lora.r", "2"]) == 0
    told = capsys.readouterr().err
    assert "the critic knows no scores yet: the first step trains it alone (ppo.critic_warmup_steps)" in told
    first, second = map(json.loads, (out / "metrics.jsonl").read_text().splitlines()[:2])
    assert first["value/mean"] == pytest.approx(first["reward"]) and first["reward"] >= 50
    assert first["value/explained_variance"] >= -1e-6 and "value/loss" in first and "policy/loss" not in first
    assert "policy/loss" in second and second["learning_rate"] > 0


def new_critic() -> Critic:
    model = tiny_scalar_model()
    torch.nn.init.zeros_(model.score.weight)
    return Critic(trained(HybridEngine(ScalarModel(model), pad_id=0)), is_new=True)


def test_a_new_critic_learns_marks_of_up_to_100_in_their_standard_deviations():
    critic = new_critic()
    critic.begin(torch.tensor([50.0, 70.0, 60.0, 80.0]))
    assert (critic.mean, critic.std) == (65.0, pytest.approx(125**0.5))  # 15, 5, 5, 15 from the mean
    prompts = Prompts([[5, 6], [7]], ["x"] * 2)
    rollout = Rollout.from_responses(prompts, [[8, 3], [9, 10, 3]], [True] * 2, 0, [""] * 2)
    assert critic.values(rollout)[rollout.action_mask].tolist() == pytest.approx([65.0] * 5)
    with torch.no_grad():
        critic.engine.module.model.score.weight.fill_(0.1)
    told, plain = critic.values(rollout), ScalarModel(critic.engine.module.model)
    raw = plain(rollout.sequences(0))[0, 1]  # before the first action of the first row
    assert float(told[0, 0]) == pytest.approx(65 + 125**0.5 * float(raw), rel=1e-5)


def test_a_critic_that_has_learned_keeps_its_scale_and_scores_that_do_not_differ_have_none():
    critic = new_critic()
    critic.begin(torch.full((4,), 3.0))
    assert (critic.mean, critic.std) == (3.0, 1.0)
    copied = Critic(trained(HybridEngine(ScalarModel(tiny_scalar_model(), 2.0, 0.5), pad_id=0)))
    copied.begin(torch.tensor([50.0, 70.0]))
    assert (copied.mean, copied.engine.module.mean, copied.engine.module.std) == (0.0, 2.0, 0.5)


def test_a_critic_from_a_reward_model_says_of_the_first_responses_what_their_scores_are_on_average():
    """Scores of 50, 70 and 60 of three responses, and none of the second."""
    model = tiny_scalar_model(7)
    critic = Critic(trained(HybridEngine(ScalarModel(model, 2.0, 0.5), pad_id=0)), is_rescaled=True)
    prompts = Prompts([[5, 6], [7], [8], [9, 10]], ["x"] * 4)
    rollout = Rollout.from_responses(prompts, [[8, 3], [9, 10, 3], [4, 3], [11, 12]], [True] * 4, 0, [""] * 4)
    critic.begin(torch.tensor([50.0, math.nan, 70.0, 60.0]), rollout)
    rows = [torch.tensor([p + r]) for p, r in (([5, 6], [8, 3]), ([8], [4, 3]), ([9, 10], [11, 12]))]
    with torch.no_grad():
        said = [model.score(model.base_model(row).last_hidden_state[0])[:, 0] for row in rows]  # at every token
    last = torch.stack([numbers[-1] for numbers in said])
    assert (critic.mean, critic.std) == (60.0, pytest.approx((200 / 3) ** 0.5))
    wanted = 60 + critic.std * (said[2][1:3] - last.mean()) / last.std(correction=0)  # before each of two actions
    torch.testing.assert_close(critic.values(rollout)[3, :2], wanted, rtol=1e-4, atol=1e-3)
    again = Critic(trained(HybridEngine(ScalarModel(model), pad_id=0)), is_rescaled=True)
    again.set_scale(*Roles(None, critic=critic).state()["value_scale"])  # as a checkpoint has it
    torch.testing.assert_close(again.values(rollout), critic.values(rollout))


def test_the_scale_of_the_values_goes_on_with_the_run_and_bounds_their_move():
    marks = Source(lambda rollout: 60 + 10 * torch.arange(float(len(rollout))))
    first = ppo(settings(cliprange_value=0.2), marks)
    first.roles.critic = new_critic()
    first.step(PROMPTS)
    assert first.roles.critic.mean == pytest.approx(115)  # of 60, 70, ..., 170
    second = ppo(settings(), marks)
    second.roles.critic = new_critic()
    second.load_state(first.state())
    spread = (100 * 143 / 12) ** 0.5  # of twelve numbers, each 10 from the next: 34.5
    assert (second.roles.critic.mean, second.roles.critic.std) == (115.0, pytest.approx(spread))
    last = first.last_rollout
    torch.testing.assert_close(second.roles.critic.values(last), first.roles.critic.values(last))
    rows = last.rows(torch.tensor([0]))
    old = rows.values[rows.action_mask]
    rows.returns = rows.values + 10 * spread
    for move, clipped in ((0.1, 0.0), (0.3, 1.0)):  # of standard deviations of the scores, towards the return
        observed = first.critic_loss(old + move * spread, rows, rows.totals())[1]
        assert observed["value/clip_fraction"][0] == clipped


@pytest.mark.parametrize(("given", "head", "steps", "expected"), [
    (None, None, 100, 5), (None, None, 30, 3), (None, None, 9, 0),  # a short run has none to spare
    (None, "runs/reward/model", 100, 0), (2, None, 100, 2), (0, None, 100, 0), (2, "runs/reward/model", 9, 2)])
def test_how_long_the_critic_warms_up_goes_by_what_it_starts_from(given, head, steps, expected):
    method = SimpleNamespace(critic_warmup_steps=given, needs_critic=True)
    assert on_policy._critic_warmup_steps(method, {"critic": Start("base", None, head)}, steps) == expected
