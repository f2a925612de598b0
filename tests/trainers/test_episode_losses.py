"""Episodes of several turns, a tool's tokens between them: one step of each method against plain torch.

The plain side has no masks: each episode goes by itself through a whole forward of transformers, the log-probabilities
of the places where the policy sampled are picked by number, and advantages are worked out in Python's floats.
"""

from __future__ import annotations

from itertools import chain
from statistics import fmean, pstdev, stdev
from typing import NamedTuple

import pytest
import torch

from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.tensors import KeptSets
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, SamplingConfig, ZeroConfig
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.roles import Actor, Critic, PolicyModule, Reference, Roles
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.trainers.ppo import PPOConfig, PPOTrainer
from tests.factories.tiny import tiny_causal_lm, tiny_scalar_model, tiny_tokenizer
from tests.factories.trainers import Source

PROMPTS = [[5, 6, 7], [5, 6, 7], [8, 9], [8, 9]]
TURNS = [  # what the policy said, what a tool said, what the policy said, ...
    [[10, 11, 3], [40, 41, 42, 43], [12, 13, 3], [44, 45], [14, 3]],
    [[10, 11, 3], [40, 41, 42, 43], [12, 16, 17]],  # begins as its neighbour does, and is cut off
    [[19, 20, 3]],
    [[21, 22, 3], [49, 50]],  # the tool has the last word
]
HAS_EOS, SCORES = [True, False, True, False], [1.0, -0.5, 2.0, 0.25]
ACTIONS = [[3, 4, 5, 10, 11, 12, 15, 16], [3, 4, 5, 10, 11, 12], [2, 3, 4], [2, 3, 4]]  # places in the sequences
RESPONSES = [list(chain.from_iterable(turns)) for turns in TURNS]
EPISODES = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
NUM_ACTIONS, LENGTH, TEMPERATURE, RATE = 20, 24, 0.7, 0.2
Rows = list[torch.Tensor]


class Case(NamedTuple):
    """A method's settings, and how the plain side averages its loss ("token", "sequence", "constant"). is_truncated:
    whether each token was drawn from a set of words."""

    settings: dict
    averaging: str = "token"
    is_truncated: bool = False


CASES = {
    "grpo": Case({"estimator": "grpo", "kl_coef": 0.04, "entropy_coef": 0.1}, "sequence"),
    "dr_grpo": Case({"estimator": "dr_grpo", "kl_coef": 0.04}, "constant"),
    "dapo": Case({"estimator": "grpo", "aggregation": "token", "cliprange_high": 0.28, "kl_coef": 0.0}),
    "rloo": Case({"estimator": "rloo", "kl_coef": 0.05}),
    "reinforce_pp": Case({"estimator": "reinforce_pp", "kl_coef": 0.05, "gamma": 0.9}),
    "gae": Case({"estimator": "gae", "kl_coef": 0.05, "gamma": 0.9, "lam": 0.8}),
    "grpo, truncated": Case({"estimator": "grpo", "kl_coef": 0.04, "entropy_coef": 0.1}, "sequence", True),
    "gae, truncated": Case({"estimator": "gae", "kl_coef": 0.05, "gamma": 0.9, "lam": 0.8}, "token", True),
}


def words_of(i: int) -> list[list[int]]:
    """The words that each sampled token of episode i was drawn from, its own among them."""
    return [sorted({EPISODES[i][t], *range(3 + (7 * t + i) % 5, 300, 3 + t % 4)}) for t in ACTIONS[i]]


def episodes(is_truncated: bool = False) -> Rollout:
    """The record of the episodes as a sampler leaves it; what stands beside the actions is nobody's business."""
    sampled = [[n % 2 == 0 for n, part in enumerate(turns) for _ in part] for turns in TURNS]
    made = Rollout.from_responses(Prompts(PROMPTS, ["p", "p", "q", "q"]), RESPONSES, HAS_EOS, 0, ["a", "b", "c", "d"],
                                  sampled, TEMPERATURE)
    made.sampled_logprobs = torch.where(made.action_mask, -1.0, 50.0)
    if is_truncated:
        made.kept = KeptSets.of_rows([[torch.tensor(w, dtype=torch.int32) for w in words_of(i)] for i in range(4)])
    return made


def models() -> dict:
    policy, reference = (tiny_causal_lm(seed, initializer_range=0.2) for seed in (3, 4))
    return {"policy": policy, "reference": reference, "critic": tiny_scalar_model(5, initializer_range=0.2)}


def trainer_of(own: dict, settings: dict, max_tokens: int) -> PPOTrainer:
    def trained(engine: HybridEngine) -> HybridEngine:
        return engine.prepare_training(OptimizerConfig(learning_rate=RATE, optim="sgd", max_grad_norm=1e9),
                                       lambda step: 1.0, ZeroConfig())

    fixed = {"normalise_scores": False, "num_minibatches": 1, "missing_eos_penalty": 0.0, "old_logprobs": "recompute"}
    sampling = SamplingConfig(max_new_tokens=LENGTH, num_samples=2, temperature=TEMPERATURE)
    config = PPOConfig(sampling=sampling, **fixed | settings)
    policy, reference = (HybridEngine(PolicyModule(own[k]), own[k], pad_id=0) for k in ("policy", "reference"))
    critic = Critic(trained(HybridEngine(ScalarModel(own["critic"]), pad_id=0)), max_tokens)
    roles = Roles(Actor(trained(policy), tiny_tokenizer(), max_tokens),
                  Reference(reference, max_tokens) if config.kl_coef else None,
                  critic if config.needs_critic else None)
    return PPOTrainer(roles, Source(lambda rollout: torch.tensor(SCORES)), config, seed=0)


def plain_scores(model, is_truncated: bool = False) -> tuple[Rows, Rows]:  # noqa: ANN001
    """(log-probabilities, entropies) of each episode's sampled tokens, from its whole logits."""
    logprobs, entropies = [], []
    for i, (ids, places) in enumerate(zip(EPISODES, ACTIONS, strict=True)):
        logits = model(torch.tensor([ids])).logits[0] / TEMPERATURE
        if is_truncated:
            among = [torch.stack([logits[t - 1, w] for w in words]).log_softmax(-1)
                     for t, words in zip(places, words_of(i), strict=True)]
            logprobs.append(torch.stack([values[words.index(ids[t])] for t, words, values
                                         in zip(places, words_of(i), among, strict=True)]))
            entropies.append(torch.stack([-(values.exp() * values).sum() for values in among]))
            continue
        whole = logits.log_softmax(-1)
        logprobs.append(torch.stack([whole[t - 1, ids[t]] for t in places]))
        entropies.append(torch.stack([-(whole[t - 1].exp() * whole[t - 1]).sum() for t in places]))
    return logprobs, entropies


def plain_values(model) -> Rows:  # noqa: ANN001
    """The value of the state before each sampled token: after a tool, that of the tool's last token."""
    hidden = [model.model(torch.tensor([ids])).last_hidden_state[0] for ids in EPISODES]
    return [model.score(h)[:, 0][[t - 1 for t in places]] for h, places in zip(hidden, ACTIONS, strict=True)]


def whitened(rows: list[list[float]]) -> list[list[float]]:
    whole = [x for row in rows for x in row]
    return [[(x - fmean(whole)) / (pstdev(whole) ** 2 + 1e-8) ** 0.5 for x in row] for row in rows]


def plain_advantages(settings: dict, old: Rows, ref: Rows, values: Rows) -> tuple[list, list]:
    """(advantages, returns) of each episode's actions, in the order of actions, whatever lies between two of them."""
    gamma, lam, estimator = settings.get("gamma", 1.0), settings.get("lam", 1.0), settings["estimator"]
    in_reward = settings["kl_coef"] if estimator in ("rloo", "reinforce_pp", "gae") else 0.0
    rewards = [[-in_reward * float(o - r) for o, r in zip(*rows, strict=True)] for rows in zip(old, ref, strict=True)]
    for row, score in zip(rewards, SCORES, strict=True):
        row[-1] += score
    totals = [sum(row) for row in rewards]
    if estimator in ("grpo", "dr_grpo", "rloo"):
        pairs = [totals[:2], totals[:2], totals[2:], totals[2:]]
        scale = {"grpo": lambda pair: 1 / (stdev(pair) + 1e-4), "dr_grpo": lambda pair: 1, "rloo": lambda pair: 2}
        ours = [(x - fmean(pair)) * scale[estimator](pair) for x, pair in zip(totals, pairs, strict=True)]
        return [[a] * len(row) for a, row in zip(ours, rewards, strict=True)], []
    advantages, returns = [], []
    for row, state in zip(rewards, values, strict=True):
        value = [float(v) for v in state] + [0.0] if estimator == "gae" else [0.0] * (len(row) + 1)
        found, after = [], 0.0
        for t in reversed(range(len(row))):
            after = row[t] + gamma * value[t + 1] - value[t] + gamma * (lam if estimator == "gae" else 1) * after
            found.insert(0, after)
        advantages.append(found)
        returns.append([a + v for a, v in zip(found, value, strict=False)])
    return whitened(advantages), returns


def plain_policy_loss(case: Case, model, old: Rows, ref: Rows, advantages: list) -> tuple:  # noqa: ANN001
    """(loss of the update, mean loss of the actions without KL and entropy, mean entropy, share of clipped actions)."""
    settings, total, surrogate, clipped = case.settings, 0.0, 0.0, 0
    logprobs, entropies = plain_scores(model, case.is_truncated)
    low, high = 0.8, 1 + settings.get("cliprange_high", 0.2)
    for i, row in enumerate(logprobs):
        share = {"token": NUM_ACTIONS, "sequence": 4 * len(row), "constant": 4 * LENGTH}[case.averaging]
        for t, new in enumerate(row):
            ratio, a = (new - old[i][t]).exp(), advantages[i][t]
            loss = -torch.minimum(ratio * a, ratio.clamp(low, high) * a)
            clipped += bool((ratio > high and a > 0) or (ratio < low and a < 0))
            surrogate += loss.item() / NUM_ACTIONS
            if settings["estimator"] in ("grpo", "dr_grpo"):
                gap = ref[i][t] - new
                loss = loss + settings["kl_coef"] * (gap.exp() - gap - 1)
            total = total + loss / share
    entropy = torch.cat(entropies).mean()
    return total - settings.get("entropy_coef", 0.0) * entropy, surrogate, entropy.item(), clipped / NUM_ACTIONS


def plain_value_loss(model, old: Rows, returns: list) -> torch.Tensor:  # noqa: ANN001
    new, before, aims = torch.cat(plain_values(model)), torch.cat(old), torch.tensor(list(chain.from_iterable(returns)))
    near = before + (new - before).clamp(-0.2, 0.2)
    return 0.5 * torch.maximum((new - aims).square(), (near - aims).square()).mean()


def plain_steps(case: Case, own: dict, num_steps: int) -> dict[str, list]:
    """Descend on the weights in `own` as one rollout's updates should; what was seen at each update."""
    with torch.no_grad():
        old, ref = (plain_scores(own[name], case.is_truncated)[0] for name in ("policy", "reference"))
        values = plain_values(own["critic"])
    advantages, returns = plain_advantages(case.settings, old, ref, values)
    seen: dict[str, list] = {"policy/loss": [], "entropy": [], "policy/clip_fraction": [], "grad_norm": []}
    for _ in range(num_steps):
        loss, surrogate, entropy, clipped = plain_policy_loss(case, own["policy"], old, ref, advantages)
        seen["grad_norm"].append(descend(loss, own["policy"]))
        for name, value in (("policy/loss", surrogate), ("entropy", entropy), ("policy/clip_fraction", clipped)):
            seen[name].append(value)
        if case.settings["estimator"] == "gae":
            loss = plain_value_loss(own["critic"], values, returns)
            seen.setdefault("value/loss", []).append(float(loss))
            seen.setdefault("value/grad_norm", []).append(descend(loss, own["critic"]))
    kl = sum(float((o - r).sum()) for o, r in zip(old, ref, strict=True)) / 4
    return seen | ({"kl": [kl]} if case.settings["kl_coef"] else {})


def descend(loss: torch.Tensor, model) -> float:  # noqa: ANN001
    """One step of plain descent; the norm of the gradient."""
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= RATE * weight.grad
    return float(torch.cat([weight.grad.flatten() for weight in model.parameters()]).norm())


def has_moved_alike(mine, theirs, start) -> None:  # noqa: ANN001
    """Every weight, by what it moved: with one step of plain descent that is its gradient."""
    for (name, a), b, before in zip(mine.named_parameters(), theirs.parameters(), start.parameters(), strict=True):
        moved = (b - before).abs().max()
        assert moved > 1e-4, name
        assert (a - b).abs().max() < 2e-3 * moved, name


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("max_tokens", [20, 8192])
@pytest.mark.parametrize("name", CASES)
def test_a_step_on_episodes_is_plain_torch_s_on_the_sampled_places(name, max_tokens, num_steps, monkeypatch):
    """Two steps: the second one's ratios are not 1, and some of them are clipped."""
    case, own, twin, start = CASES[name], models(), models(), models()
    trainer = trainer_of(own, case.settings | {"num_ppo_epochs": num_steps}, max_tokens)
    monkeypatch.setattr(Actor, "generate", lambda *_: episodes(case.is_truncated))
    metrics = trainer.step(Prompts([[5, 6, 7], [8, 9]], ["p", "q"])).compute()
    expected = plain_steps(case, twin, num_steps)
    for metric, values in expected.items():
        assert metrics[metric] == pytest.approx(fmean(values), rel=1e-3, abs=1e-5), metric
    if num_steps == 2:
        assert 0 < expected["policy/clip_fraction"][1] < 1
    has_moved_alike(own["policy"], twin["policy"], start["policy"])
    if case.settings["estimator"] == "gae":
        has_moved_alike(own["critic"], twin["critic"], start["critic"])


def estimated(trainer: PPOTrainer) -> Rollout:
    """The episodes with all that the roles say of them, as `step` has them before the update."""
    made, roles = episodes(), trainer.roles
    made.logprobs = roles.actor.logprobs(made) - 0.1 * made.action_mask  # off policy: the ratio is not 1
    made.ref_logprobs = roles.ref.logprobs(made)
    made.values = roles.critic.values(made) if roles.critic else None
    made.sampled_logprobs, made.scores = made.logprobs - 0.2, torch.tensor(SCORES)
    trainer.shape(made)
    return made


@pytest.mark.parametrize("importance", ["none", "token", "sequence", "masked"])
@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp", "gae"])
def test_what_stands_in_the_holes_is_never_read(name, importance):
    """NaN beside the actions, in all that the roles said, moves no weight and no number."""
    found = []
    for beside in (0.0, float("nan")):
        own = models()
        trainer = trainer_of(own, CASES[name].settings | {"num_ppo_epochs": 1, "importance": importance}, 8192)
        made, metrics = estimated(trainer), Metrics()
        for field in ("logprobs", "ref_logprobs", "sampled_logprobs", *(["values"] if name == "gae" else [])):
            setattr(made, field, getattr(made, field).masked_fill(~made.action_mask, beside))
        trainer.estimate(made, metrics)
        numbers = (metrics + trainer.update(made) + made.metrics()).compute()
        found.append(({k: v for k, v in numbers.items() if not k.startswith("memory/")},
                      [w.detach() for model in own.values() for w in model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_lengths_and_means_are_of_sampled_tokens(monkeypatch):
    own = models()
    trainer = trainer_of(own, CASES["grpo"].settings | {"num_ppo_epochs": 1}, 8192)
    monkeypatch.setattr(Actor, "generate", lambda *_: episodes())
    metrics = trainer.step(Prompts([[5, 6, 7], [8, 9]], ["p", "q"])).compute()
    lengths = [8, 6, 3, 3]  # of 14, 10, 3 and 5 tokens
    assert metrics["completions/mean_length"] == fmean(lengths)
    assert (metrics["completions/min_length"], metrics["completions/max_length"]) == (3, 8)
    assert metrics["completions/clipped_ratio"] == 0.5 and metrics["policy/ratio"] == pytest.approx(1, abs=1e-5)
    with torch.no_grad():
        drift = (torch.cat(plain_scores(models()["policy"])[0]) + 1).abs().mean()
    assert metrics["engine/logprob_drift"] == pytest.approx(float(drift), rel=1e-4)


def test_the_overlong_penalty_counts_what_max_new_tokens_counts():
    """Answers of tools included, as TRL counts: an episode that they fill pays before it is cut off."""
    trainer = trainer_of(models(), {"estimator": "grpo", "kl_coef": 0.0, "overlong_penalty": 2.0,
                                    "overlong_buffer": 12}, 64)
    rollout = episodes()
    rollout.scores = torch.zeros(4)
    trainer.shape(rollout)
    assert [len(response) for response in RESPONSES] == [14, 10, 3, 5] and LENGTH == 24
    torch.testing.assert_close(rollout.shaped_scores, torch.tensor([-2.0 * 2 / 12, 0, 0, 0]))
