"""The trainers learn what can be learned: a small set by heart, and a reward that anything can find."""

from __future__ import annotations

import json
from pathlib import Path

import methods
import pytest
import torch
from methods_settings import METHODS, common

from hybrid_rlhf.cli import main
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, SamplingConfig, ZeroConfig
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.roles import Actor, Critic, PolicyModule, Reference, Roles
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.trainers.ppo import PPOConfig, PPOTrainer
from tests.factories.tiny import own_cache, save_tiny, tiny_causal_lm, tiny_scalar_model, tiny_tokenizer

PAIRS = {"what is the sky": "blue", "what is the sea": "green", "name a pet": "a cat", "count": "1 2 3 4",
         "who lives in a wood": "a red fox", "say nothing": "no", "last word of sun cat": "cat", "first": "once upon"}


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # learning


@pytest.fixture(scope="module")
def memorised(tmp_path_factory):
    """The folder of an SFT run that saw eight demonstrations again and again."""
    folder = tmp_path_factory.mktemp("memory")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n"
                                               for p, c in PAIRS.items()))
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        assert main(["--stage", "sft", "--output_dir", f"{folder}/sft", "--data.split", "null", "--model.dtype",
                     "float32", f"--data.sources=[{{path: {folder}/rows.jsonl}}]", "--data.eval_fraction", "0",
                     "--model.model_name_or_path", save_tiny(folder / "base"), "--train.learning_rate", "1e-2",
                     "--train.max_steps", "120", "--data.max_length", "64", "--train.logging_steps", "40"]) == 0
    return folder / "sft"


def test_sft_learns_a_small_set_by_heart(memorised) -> None:
    rows = [json.loads(line) for line in (memorised / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["loss"] > 5  # a model that knows nothing: log 300 = 5.7
    assert rows[-1]["loss"] < 0.05
    assert rows[-1]["mean_token_accuracy"] == 1


@torch.no_grad()
def test_plain_transformers_recites_what_sft_learned_and_ends(memorised) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(memorised / "model")
    model = AutoModelForCausalLM.from_pretrained(memorised / "model").eval()
    for prompt, answer in PAIRS.items():
        asked = [{"role": "user", "content": prompt}]  # as strings are trained where there is a template
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)[0]
        assert tokenizer.decode(out[ids.shape[1]:], skip_special_tokens=True).strip() == answer
        assert out[-1] == tokenizer.eos_token_id


class ShareOfToken:
    """Pays for one token: its share among the response's tokens."""

    name = "token"

    def __init__(self, token: int) -> None:
        self.token = token

    def score(self, rollout: Rollout) -> torch.Tensor:
        mask = rollout.action_mask
        return ((rollout.response_ids == self.token) & mask).sum(1) / mask.sum(1)


def trainer(source, kl_coef: float) -> PPOTrainer:
    zero, adam = ZeroConfig(zero_stage=0), OptimizerConfig(learning_rate=3e-3)
    actor, ref, critic = tiny_causal_lm(0), tiny_causal_lm(0), tiny_scalar_model(1)
    tokenizer = tiny_tokenizer()
    engines = [HybridEngine(PolicyModule(actor), actor, eos_ids=[3]), HybridEngine(ScalarModel(critic))]
    for engine in engines:
        engine.prepare_training(adam, lambda step: 1.0, zero)
    roles = Roles(Actor(engines[0], tokenizer), Reference(HybridEngine(PolicyModule(ref), ref, eos_ids=[3])),
                  Critic(engines[1]))
    config = PPOConfig(sampling=SamplingConfig(max_new_tokens=8), kl_coef=kl_coef, num_ppo_epochs=2,
                       num_minibatches=1, missing_eos_penalty=0.0, normalise_scores=False, score_clip=None,
                       gamma=1.0, lam=0.95)
    return PPOTrainer(roles, source, config, seed=0)


PROMPTS = Prompts(ids=[[2, 10 + i, 20 + i] for i in range(64)], texts=["x"] * 64)


def scores_over(run: PPOTrainer, steps: int) -> list[torch.Tensor]:
    """The 64 scores of each step."""
    out = []
    for _ in range(steps):
        run.step(PROMPTS)
        out.append(run.last_rollout.scores)
    return out


@pytest.fixture(scope="module")
def free() -> tuple[PPOTrainer, list[torch.Tensor]]:
    run = trainer(ShareOfToken(77), kl_coef=0.0)
    return run, scores_over(run, 40)


def test_ppo_raises_the_reward_that_a_token_pays(free) -> None:
    first, last = torch.cat(free[1][:3]), torch.cat(free[1][-3:])
    error = (first.var() / len(first) + last.var() / len(last)).sqrt()
    assert first.mean() < 0.05  # one token of 300
    assert last.mean() > 0.8
    assert (last.mean() - first.mean()) / error > 10


def test_the_price_of_kl_holds_ppo_near_the_reference(free) -> None:
    held = trainer(ShareOfToken(77), kl_coef=1.0)  # the most that can be earned is 1, the price of one nat
    scores_over(held, 40)
    assert free[0].last_rollout.mean_kl() > 10
    assert abs(held.last_rollout.mean_kl()) < 1


# --- one method of each family, on the embedded task, from one SFT and one reward run: `make methods` has all of them
# over three seeds (docs/results/methods.md), and bounds here are half of what was found there

@pytest.fixture(scope="module")
def start(learned) -> dict[str, float]:
    return methods.start(str(learned), 0)


def trained(learned: Path, name: str) -> dict[str, float]:
    """accuracy, score, kl and length of the method's policy on held-out prompts."""
    words = [w.replace("BESIDE", str(learned)) for w in METHODS[name]]
    methods.launch(["--stage", name, "--seed", "0", *common(name), *words], learned / name)
    return methods.measured(str(learned), 0, name)


@pytest.mark.parametrize(("name", "accuracy", "score"), [
    ("conditional_sft", 0.10, 2.0),
    ("online_dpo", 0.10, 2.0),
    ("rejection", 0.05, 1.0),
])
def test_answers_become_right_more_often_and_score_higher(learned, start, name, accuracy, score) -> None:
    found = trained(learned, name)
    assert found["accuracy"] > start["accuracy"] + accuracy
    assert found["score"] > start["score"] + score


def test_dpo_prefers_what_was_chosen_on_held_out_pairs_and_answers_better(learned, start) -> None:
    found = trained(learned, "dpo")
    rows = [json.loads(line) for line in (learned / "dpo" / "metrics.jsonl").read_text().splitlines()]
    held_out = [row for row in rows if "eval/loss" in row][-1]
    assert held_out["eval/rewards/accuracies"] > 0.75
    assert held_out["eval/loss"] < 0.6  # log 2 = 0.69 at the start
    assert found["accuracy"] > start["accuracy"] + 0.1
    assert found["score"] > start["score"] + 2
