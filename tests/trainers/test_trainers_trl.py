"""What TRL's own trainers report and do, on the same models and tokens; GRPO also on episodes with tools.

TRL's tool loop runs on turns that are written here, over Qwen2.5's chat template, and calls a tool for itself; ours is
given the tokens of the same turns and of the text between them as the template writes it.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

from hybrid_rlhf.data.collate import collate_pairs, collate_sft
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, SamplingConfig, ZeroConfig
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.roles import Actor, PolicyModule, Reference, Reward, Roles
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.trainers.ppo import PPOConfig, PPOTrainer
from hybrid_rlhf.trainers.reward import RewardTrainer
from hybrid_rlhf.trainers.sft import SFTTrainer
from tests.factories.tiny import tiny_causal_lm
from tests.factories.trainers import Source, noted_losses
from tests.factories.trl_episodes import Told, trl_grpo_steps
from tests.factories.trl_oracle import trl_reward_loss, trl_sft_loss
from tests.factories.trl_rows import PAD, TOLERANCE, pair_rows, sft_rows, tiny
from tests.factories.trl_templates import tokenizer_of

PROMPTS = [[{"role": "user", "content": "What is 2 / 2?"}], [{"role": "user", "content": "What is 4 / 0?"}]]
CALL = '<tool_call>\n{"name": "divide", "arguments": {"a": %d, "b": %d}}\n</tool_call><|im_end|>'
ANSWER = "\n<|im_start|>user\n<tool_response>\n%s\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
EPISODES = [  # what the model says, what the tool says, what the model says, ...
    [CALL % (6, 2), ANSWER % "3", CALL % (2, 2), ANSWER % "1", "It is 1.<|im_end|>"],
    [CALL % (6, 2), ANSWER % "3", "So it must"],  # cut off
    ["None.<|im_end|>"],
    [CALL % (4, 0), ANSWER % "{'error': 'no zero'}", "Oh.<|im_end|>"],  # the tool fails
]
SCORES, HAS_EOS, LENGTH, TEMPERATURE, RATE = [1.0, -0.5, 2.0, 0.25], [True, False, True, True], 320, 0.8, 0.05


def divide(a: int, b: int) -> int:
    """
    Divides whole numbers.

    Args:
        a: What is divided.
        b: By what.
    """
    if not b:
        raise ValueError("no zero")
    return a // b


@cache
def tokenizer():
    return tokenizer_of("qwen2_5")


def ids_of(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def model_of(seed: int):
    return tiny_causal_lm(seed, vocab_size=len(tokenizer()), max_position_embeddings=2048, initializer_range=0.2,
                          eos_token_id=tokenizer().eos_token_id)


@cache
def trl_steps(**options: object) -> Told:
    turns = [[ids_of(part) for part in parts[::2]] for parts in EPISODES]
    return trl_grpo_steps(model_of(3), model_of(4), tokenizer(), PROMPTS, turns, SCORES, [divide], RATE,
                          max_completion_length=LENGTH, temperature=TEMPERATURE, use_bias_correction_kl=False,
                          **options)


def episodes(prompt_ids: list[list[int]]) -> Rollout:
    """Ours, from the turns and the text between them."""
    parts = [[ids_of(part) for part in each] for each in EPISODES]
    made = Rollout.from_responses(
        Prompts(prompt_ids, ["p", "p", "q", "q"]), [[i for part in each for i in part] for each in parts], HAS_EOS, 0,
        ["a", "b", "c", "d"], [[n % 2 == 0 for n, part in enumerate(each) for _ in part] for each in parts],
        TEMPERATURE)
    made.sampled_logprobs = made.action_mask * -1.0
    return made


def our_steps(told: Told, monkeypatch, settings: dict) -> tuple[dict, list[float], torch.nn.Module]:
    """(metrics, the loss of each optimizer step, the policy as they left it)."""
    policy, reference = model_of(3), model_of(4)
    engine = HybridEngine(PolicyModule(policy), policy, pad_id=0).prepare_training(
        OptimizerConfig(learning_rate=RATE, optim="sgd", max_grad_norm=1e9), lambda step: 1.0, ZeroConfig())
    config = PPOConfig(sampling=SamplingConfig(max_new_tokens=LENGTH, num_samples=2, temperature=TEMPERATURE),
                       normalise_scores=False, num_minibatches=1, missing_eos_penalty=0.0, old_logprobs="recompute",
                       **settings)
    reference = Reference(HybridEngine(PolicyModule(reference), reference, pad_id=0)) if config.kl_coef else None
    trainer = PPOTrainer(Roles(Actor(engine, tokenizer()), reference), Source(lambda rollout: torch.tensor(SCORES)),
                         config, seed=0)
    losses = noted_losses(trainer)
    monkeypatch.setattr(Actor, "generate", lambda *_: episodes(told.prompt_ids))
    metrics = trainer.step(Prompts(told.prompt_ids[::2], ["p", "q"])).compute()
    size = len(losses) // config.num_ppo_epochs  # micro-batches of a step
    return metrics, [sum(losses[i : i + size]) for i in range(0, len(losses), size)], policy


CASES = {  # ours, TRL's
    "grpo": ({"estimator": "grpo"}, {"loss_type": "grpo"}),
    "dr_grpo": ({"estimator": "dr_grpo"}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": ({"estimator": "grpo", "aggregation": "token", "cliprange_high": 0.28},
             {"loss_type": "dapo", "epsilon_high": 0.28}),
    "bnpo": ({"estimator": "grpo", "aggregation": "token"}, {"loss_type": "bnpo"}),
    "gspo": ({"estimator": "grpo", "policy_loss": "gspo"},
             {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "luspo": ({"estimator": "grpo", "policy_loss": "gspo", "aggregation": "sum"},
              {"loss_type": "luspo", "importance_sampling_level": "sequence"}),
    "sapo": ({"estimator": "grpo", "policy_loss": "sapo"}, {"loss_type": "sapo"}),
    "vespo": ({"estimator": "batch_grpo", "policy_loss": "vespo"}, {"loss_type": "vespo", "scale_rewards": "batch"}),
    "truncated": ({"estimator": "grpo", "mask_truncated": True},
                  {"loss_type": "grpo", "mask_truncated_completions": True}),
    "entropy": ({"estimator": "grpo", "top_entropy_quantile": 0.2}, {"loss_type": "grpo", "top_entropy_quantile": 0.2}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "beta", "num_steps"), [
    ("grpo", 0.0, 1), ("grpo", 0.04, 2), ("dr_grpo", 0.04, 2), ("dapo", 0.0, 2), ("bnpo", 0.04, 2), ("gspo", 0.04, 2),
    ("luspo", 0.0, 2), ("sapo", 0.04, 2), ("vespo", 0.0, 2), ("truncated", 0.04, 2), ("entropy", 0.0, 2)])
def test_the_losses_and_all_weights_are_trl_s(name, beta, num_steps, monkeypatch):
    """The second of two steps on one rollout is off policy: its ratios are not 1. TRL's KL without the ratio as a
    factor, which its default has since 1.16 (use_bias_correction_kl) and the papers of these methods have not."""
    ours, theirs = CASES[name]
    told = trl_steps(beta=beta, num_iterations=num_steps, **theirs)
    metrics, losses, policy = our_steps(told, monkeypatch, ours | {"kl_coef": beta, "num_ppo_epochs": num_steps})
    torch.testing.assert_close(losses, [entry["loss"] for entry in told.logs], rtol=1e-3, atol=2e-5)
    for (weight, start), mine, trl in zip(model_of(3).named_parameters(), policy.parameters(),
                                          told.model.parameters(), strict=True):
        moved = (trl - start).abs().max()
        assert moved > 1e-5, weight
        assert (mine - trl).abs().max() < 1e-3 * moved, weight
    assert metrics["entropy"] == pytest.approx(sum(entry["entropy"] for entry in told.logs) / num_steps, rel=1e-3)
    assert metrics["loss"] == pytest.approx(sum(entry["loss"] for entry in told.logs) / num_steps, rel=1e-3, abs=2e-5)


def test_trl_s_loop_makes_the_same_tokens_and_reports_the_same_lengths(monkeypatch):
    told = trl_steps(beta=0.0, num_iterations=1, loss_type="grpo")
    made = episodes(told.prompt_ids)
    for i, (ids, mask) in enumerate(zip(told.completion_ids, told.tool_mask, strict=True)):
        assert made.response_ids[i][made.response_mask[i]].tolist() == ids
        assert made.action_mask[i][made.response_mask[i]].int().tolist() == mask
    assert made.num_tokens == told.logs[0]["num_tokens"]
    metrics, _, _ = our_steps(told, monkeypatch, {"estimator": "grpo", "kl_coef": 0.0, "num_ppo_epochs": 1})
    for name in ("completions/mean_length", "completions/min_length", "completions/max_length",
                 "completions/mean_terminated_length", "completions/min_terminated_length",
                 "completions/max_terminated_length", "completions/clipped_ratio", "reward", "frac_reward_zero_std"):
        assert metrics[name] == pytest.approx(told.logs[0][name], rel=1e-4), name
    assert told.logs[0]["tools/call_frequency"] == 4 / 4  # calls by episode
    assert told.logs[0]["tools/failure_frequency"] == 1 / 4  # failures by call


# --- SFT and reward models: the first step's loss, on the same model and batch, in fp32

def _engine(module: torch.nn.Module, model: torch.nn.Module | None = None) -> HybridEngine:
    return HybridEngine(module, model, pad_id=PAD).prepare_training(OptimizerConfig(), lambda step: 1.0, ZeroConfig())


@pytest.mark.parametrize("max_tokens", [12, 8192])
def test_the_first_sft_step_reports_trl_s_loss(max_tokens):
    expected = trl_sft_loss(tiny("causal"), sft_rows(), PAD)
    model = tiny("causal")
    rows = [{"input_ids": r["input_ids"], "loss_mask": r["completion_mask"]} for r in sft_rows()]
    metrics = SFTTrainer(Actor(_engine(PolicyModule(model), model), None, max_tokens)).step(collate_sft(rows, PAD))
    assert metrics.compute()["loss"] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("with_margin", [False, True])
@pytest.mark.parametrize("max_tokens", [24, 8192])
def test_the_first_reward_step_reports_trl_s_loss(with_margin, max_tokens):
    rows = pair_rows(with_margin)
    expected = trl_reward_loss(tiny("scalar"), rows, PAD)
    trainer = RewardTrainer(Reward(_engine(ScalarModel(tiny("scalar"))), max_tokens))
    batch = collate_pairs([r | {"num_prompt_tokens": 0} for r in rows], PAD)
    assert trainer.step(batch).compute()["loss"] == pytest.approx(expected, abs=TOLERANCE)
