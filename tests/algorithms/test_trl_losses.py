"""Our losses against TRL's own, on the same models, tokens or log-probabilities, in fp32."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.algorithms.advantages import ESTIMATORS
from hybrid_rlhf.algorithms.likelihood import token_logprobs
from hybrid_rlhf.algorithms.preference import bradley_terry
from hybrid_rlhf.core.tensors import (
    SequenceBatch,
    last_true,
    length_mask,
    masked_sum,
    pad_right,
    predicted,
    predicting,
)
from hybrid_rlhf.data.collate import collate_pairs
from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.rewards.mixture import Mixture, Part
from hybrid_rlhf.roles import Roles, TokenScores
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.trainers.offline import DPOConfig
from hybrid_rlhf.trainers.ppo import PPOConfig, PPOTrainer
from tests.factories.pairs import EOS, POLICY, model, plain, trainer
from tests.factories.trl_rows import PAD, TOLERANCE, VOCABULARY, pair_rows, sft_rows, tiny

pytest.importorskip("trl")
pytest.importorskip("datasets")

from trl import GRPOConfig

from tests.factories.trl_oracle import trl_advantages, trl_reward_loss, trl_sft_loss


@torch.no_grad()
def our_sft_loss(model, rows: list[dict]) -> float:
    real = length_mask([len(r["input_ids"]) for r in rows])
    batch = SequenceBatch(pad_right([r["input_ids"] for r in rows], PAD), real,
                          pad_right([r["completion_mask"] for r in rows], 0).bool())
    hidden = predicting(model.model(batch.input_ids).last_hidden_state, batch)
    logprobs, _, _ = token_logprobs(hidden, predicted(batch), model.lm_head, chunk_size=5)
    return float(-logprobs.mean())


@torch.no_grad()
def our_reward_loss(model, rows: list[dict], center_coef: float = 0.0) -> float:
    sequences = [r["chosen_ids"] for r in rows] + [r["rejected_ids"] for r in rows]
    real = length_mask([len(s) for s in sequences])
    every = model.score(model.model(pad_right(sequences, PAD)).last_hidden_state).squeeze(-1)
    chosen, rejected = every.gather(1, last_true(real)[:, None])[:, 0].chunk(2)
    margin = torch.tensor([r["margin"] for r in rows]) if "margin" in rows[0] else None
    return float(bradley_terry(chosen, rejected, margin, center_coef).mean())


def test_the_sft_loss_on_response_tokens_is_trls():
    model, rows = tiny("causal"), sft_rows()
    ours = our_sft_loss(model, rows)
    assert ours == pytest.approx(trl_sft_loss(model, rows, PAD), abs=TOLERANCE)
    assert abs(ours - math.log(VOCABULARY)) > 0.1  # not the loss of any model at all


def test_the_comparison_notices_one_token_more():
    model, rows = tiny("causal"), sft_rows()
    more = [rows[0] | {"completion_mask": [0] * 3 + [1] * 4}, *rows[1:]]
    assert abs(our_sft_loss(model, more) - trl_sft_loss(model, rows, PAD)) > 100 * TOLERANCE


@pytest.mark.parametrize("with_margin", [False, True], ids=["plain", "margin"])
@pytest.mark.parametrize("center_coef", [0.0, 0.1], ids=["free", "centred"])
def test_the_reward_loss_at_the_last_real_token_is_trls(with_margin, center_coef):
    model, rows = tiny("scalar"), pair_rows(with_margin)
    ours = our_reward_loss(model, rows, center_coef)
    assert ours == pytest.approx(trl_reward_loss(model, rows, PAD, center_coef or None), abs=TOLERANCE)
    assert abs(ours - math.log(2)) > 0.01


def test_the_oracle_leaves_model_environment_and_random_numbers_as_they_were(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")  # as joining a process group does, and what makes accelerate write the rest
    model, rows = tiny("causal"), sft_rows()
    weights, environment = {name: p.clone() for name, p in model.state_dict().items()}, dict(os.environ)
    numbers = torch.random.get_rng_state()
    trl_sft_loss(model, rows, PAD)
    assert all(torch.equal(weights[name], p) for name, p in model.state_dict().items())
    assert not model.training and model.config.pad_token_id == PAD and model.config.eos_token_id == 2
    assert dict(os.environ) == environment
    assert torch.equal(torch.random.get_rng_state(), numbers)


def test_the_oracle_refuses_pads_among_the_tokens():
    with pytest.raises(ValueError, match="pad id 0"):
        trl_reward_loss(tiny("scalar"), [{"chosen_ids": [3, PAD], "rejected_ids": [4]}], PAD)


# --- ORPO's whole loss against TRL's own `get_batch_loss_metrics`, on the same model and tokens, in fp32

BETA = 0.3
# a prompt of one token is never predicted, and with answers of one length the mean over the batch's tokens is the mean
# of the answers' means: here TRL's supervised term is the paper's
EVEN = [([5], [7, 8, EOS], [9, 10, EOS]), ([13], [14, 15, EOS], [6, 4, EOS])]
UNEVEN = [([5, 6], [7, 8, EOS], [9, 10, 11, 12, EOS]), ([13], [14, 15, 16, EOS], [EOS]),
          ([17, 18, 19], [20, EOS], [21, EOS])]


def trl_orpo(triples: list) -> float:
    trl = pytest.importorskip("trl.experimental.orpo.orpo_trainer").ORPOTrainer

    def side(which: int) -> dict:
        rows = [row[0] + row[which] for row in triples]
        labels = [[-100] * len(row[0]) + row[which] for row in triples]
        return {"input_ids": pad_right(rows, 0), "attention_mask": length_mask([len(r) for r in rows]).long(),
                "labels": pad_right(labels, -100)}

    batch = {f"{name}_{key}": value for name, which in (("chosen", 1), ("rejected", 2))
             for key, value in side(which).items()}
    stand = SimpleNamespace(
        beta=BETA, is_encoder_decoder=False, padding_value=0, aux_loss_enabled=False,
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        concatenated_inputs=trl.concatenated_inputs, get_batch_logps=trl.get_batch_logps)
    stand.concatenated_forward = partial(trl.concatenated_forward, stand)
    stand.odds_ratio_loss = partial(trl.odds_ratio_loss, stand)
    return float(trl.get_batch_loss_metrics(stand, model(POLICY), batch)[0].detach())


def our_orpo(triples: list) -> float:
    rows = [{"chosen_ids": p + c, "rejected_ids": p + r, "num_prompt_tokens": len(p)} for p, c, r in triples]
    return trainer(DPOConfig("orpo", beta=BETA)).step(collate_pairs(rows, 0)).compute()["loss"]


def test_the_whole_loss_is_trl_s_where_the_two_supervised_terms_are_one() -> None:
    assert our_orpo(EVEN) == pytest.approx(trl_orpo(EVEN), abs=1e-6)


def test_elsewhere_they_differ_by_the_supervised_terms_alone() -> None:
    causal = model(POLICY)
    with torch.no_grad():
        whole = torch.cat([plain(causal, (p + c)[:1], (p + c)[1:]) for p, c, _ in UNEVEN])  # TRL's: the prompt too
        answers = torch.stack([plain(causal, p, c).mean() for p, c, _ in UNEVEN])
    difference = float(-answers.mean() + whole.mean())
    assert abs(difference) > 0.05  # else nothing would be seen of it
    assert our_orpo(UNEVEN) - difference == pytest.approx(trl_orpo(UNEVEN), abs=2e-6)


# --- Our losses without a critic against TRL's own `_compute_loss`, on the same log-probabilities, with its gradients

MASK = length_mask([5, 1, 3, 7])
LENGTH = 9  # max_new_tokens
SAPO, VESPO = ({name: f.default for name, f in GRPOConfig.__dataclass_fields__.items() if name.startswith(kind)}
               for kind in ("sapo_", "vespo_"))  # TRL's defaults


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    new = -torch.rand(MASK.shape, generator=generator) * 3
    old, ref, sampled = (new + torch.randn(MASK.shape, generator=generator) * 0.3 for _ in range(3))
    return {"new": new, "old": old, "ref": ref, "scores": torch.tensor([1.0, -0.5, 2.0, 0.25]), "sampled": sampled,
            "entropy": torch.rand(MASK.shape, generator=generator)}


def trl_loss(trainer_class: type, given: dict, advantages: torch.Tensor, **settings: object) -> tuple:
    """(loss, gradient (B, R)) of TRL's trainer for log-probabilities that are given instead of computed by a model."""
    new = given["new"].clone().requires_grad_()
    options = {"loss_type": "grpo", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "delta": None,
               "importance_sampling_level": "token", "top_entropy_quantile": 1.0,
               "off_policy_mask_threshold": None} | settings
    mask = MASK & given["ended"][:, None] if "ended" in given else MASK  # mask_truncated_completions
    args = {"delta": options["delta"], "steps_per_generation": 1, "use_bias_correction_kl": False} | {
        name: options.pop(name) for name in [*options] if name.startswith(("sapo", "vespo", "use_"))}
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x,
                                  pad_across_processes=lambda x, **_: x)
    trainer = SimpleNamespace(
        **options, accelerator=accelerator, _metrics=defaultdict(lambda: defaultdict(list)),
        aux_loss_enabled=False, use_vllm=False, max_completion_length=LENGTH,
        vllm_importance_sampling_correction=False, current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True), args=SimpleNamespace(**args),
        get_gamma_weights=getattr(trainer_class, "get_gamma_weights", None),
        get_off_policy_mask=getattr(trainer_class, "get_off_policy_mask", None),
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, given["entropy"], None))
    trainer.get_high_entropy_mask = lambda *each: trainer_class.get_high_entropy_mask(trainer, *each)
    ids = torch.zeros_like(MASK, dtype=torch.long)
    loss = trainer_class._compute_loss(trainer, None, {
        "prompt_ids": ids[:, :1], "prompt_mask": MASK[:, :1].long(), "completion_ids": ids,
        "completion_mask": mask.long(), "advantages": advantages, "old_per_token_logps": given["old"],
        "ref_per_token_logps": given["ref"], "old_logps": (given["old"] * MASK).sum(1),
        "sampling_per_token_logps": given["sampled"], "num_items_in_batch": mask.sum()})
    loss.backward()
    return loss.detach(), new.grad


def our_loss(given: dict, **settings: object) -> tuple:
    """(loss, gradient (B, R), advantages (B,)) of the trainer's own path: estimate, then two micro-batches."""
    fixed = {"num_ppo_epochs": 1, "num_minibatches": 1, "kl_coef": 0.05, "missing_eos_penalty": 0.0}
    config = PPOConfig(sampling=SamplingConfig(max_new_tokens=LENGTH, num_samples=4), normalise_scores=False,
                       **(fixed | settings))
    ended = given.get("ended", torch.ones(4, dtype=torch.bool))
    rollout = Rollout.from_responses(Prompts([[5]] * 4, ["x"] * 4), [[6] * int(n) for n in MASK.sum(1)], ended.tolist(),
                                     0, [])
    rollout.logprobs, rollout.ref_logprobs, rollout.scores = given["old"], given["ref"], given["scores"]
    rollout.sampled_logprobs = given["sampled"]
    asked = []  # of the entropies, which come in micro-batches too

    def score_tokens(batch: SequenceBatch, **options: object) -> list[TokenScores]:
        asked.append((batch.loss_mask.sum(), options))
        entropy = rollout.of_actions(given["entropy"])
        return [TokenScores(part, part, None) for part in entropy.split(5)]

    actor = SimpleNamespace(engine=SimpleNamespace(pad_id=0), score_tokens=score_tokens)
    trainer = PPOTrainer(Roles(actor=actor, ref=object()), None, config, seed=0)
    metrics = SimpleNamespace(add=lambda *_: None)
    trainer.shape(rollout)
    trainer.estimate(rollout, metrics)
    rollout = rollout.without_truncated() if config.mask_truncated else rollout
    is_cut = config.top_entropy_quantile < 1
    floor = {"entropy_floor": trainer._entropy_floor(rollout)} if is_cut else {}
    assert asked == [(rollout.action_mask.sum(), {"with_entropy": True, "temperature": 1.0})] * is_cut
    new, total = given["new"].clone().requires_grad_(), 0.0
    for index in (torch.tensor([0, 3]), torch.tensor([1, 2])):
        rows = rollout.rows(index)
        scores = TokenScores(new[index][rows.action_mask], given["entropy"][index][rows.action_mask], None)
        loss, _ = trainer.actor_loss(scores, rows, rollout.totals(), **floor)
        loss.backward()
        total += loss.detach()
    return total, new.grad, rollout.advantages[:, 0]


def agree(ours: tuple, theirs: tuple) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-6)
    assert ours[1].abs().max() > 1e-3


def group_relative(scores: torch.Tensor, is_scaled: bool) -> torch.Tensor:
    """As in TRL's _generate_and_score_completions, with its own deviation."""
    from trl.trainer.utils import nanstd

    centred = scores - scores.mean()
    return centred / (nanstd(scores) + 1e-4) if is_scaled else centred


@pytest.mark.parametrize(("ours", "theirs", "is_scaled"), [
    ({"estimator": "grpo"}, {"loss_type": "grpo"}, True),
    ({"estimator": "grpo", "kl_coef": 0.04}, {"loss_type": "grpo", "beta": 0.04}, True),
    ({"estimator": "grpo", "aggregation": "token", "cliprange_high": 0.28},
     {"loss_type": "dapo", "epsilon_high": 0.28}, True),
    ({"estimator": "dr_grpo", "kl_coef": 0.1}, {"loss_type": "dr_grpo", "beta": 0.1}, False),
    ({"estimator": "grpo", "policy_loss": "gspo", "cliprange_low": 0.03, "cliprange_high": 0.04},
     {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04}, True),
    # TRL's epsilon_high is the bound of the ratio itself, ours how far above 1 it lies
    ({"estimator": "grpo", "policy_loss": "cispo", "cliprange_high": 0.1}, {"loss_type": "cispo", "epsilon_high": 1.1},
     True),
    ({"estimator": "grpo", "aggregation": "token"}, {"loss_type": "bnpo"}, True),  # theirs on one micro-batch
    ({"estimator": "grpo", "policy_loss": "sapo"}, {"loss_type": "sapo"} | SAPO, True),
    ({"estimator": "grpo", "policy_loss": "sapo", "sapo_temperature_pos": 3.0, "sapo_temperature_neg": 0.5,
      "kl_coef": 0.1}, {"loss_type": "sapo", "sapo_temperature_pos": 3.0, "sapo_temperature_neg": 0.5, "beta": 0.1},
     True),
    ({"estimator": "grpo", "policy_loss": "vespo"}, {"loss_type": "vespo"} | VESPO, True),
    ({"estimator": "dr_grpo", "policy_loss": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5,
      "vespo_k_neg": 0.25, "vespo_lambda_neg": 0.75},
     {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_k_neg": 0.25,
      "vespo_lambda_neg": 0.75}, False),
    ({"estimator": "grpo", "policy_loss": "gspo", "aggregation": "sum", "cliprange_low": 0.03, "cliprange_high": 0.04},
     {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04}, True),
    ({"estimator": "grpo", "aggregation": "sum", "kl_coef": 0.1}, {"loss_type": "luspo", "beta": 0.1}, True),
    ({"estimator": "grpo", "dual_clip": 1.3}, {"delta": 1.3}, True),
    ({"estimator": "grpo", "dual_clip": 1.25, "policy_loss": "gspo"},
     {"delta": 1.25, "importance_sampling_level": "sequence"}, True),
], ids=["grpo", "grpo_kl", "dapo", "dr_grpo_kl", "gspo", "cispo", "bnpo", "sapo", "sapo_other_kl", "vespo",
        "vespo_other", "luspo", "luspo_token_kl", "delta", "delta_gspo"])
def test_losses_and_gradients_are_trl_s(ours, theirs, is_scaled) -> None:
    from trl import GRPOTrainer

    given = tensors()
    advantages = group_relative(given["scores"], is_scaled)
    result = our_loss(given, **({"kl_coef": 0.0} | ours))
    torch.testing.assert_close(result[2], advantages, rtol=1e-6, atol=1e-6)
    agree(result, trl_loss(GRPOTrainer, given, advantages, **theirs))


CUT = {"ended": torch.tensor([True, True, True, False])}  # what has not ended is the longest


@pytest.mark.parametrize(("ours", "theirs", "more"), [
    ({"max_off_policy_kl": 0.01}, {"off_policy_mask_threshold": 0.01}, {}),
    ({"max_off_policy_kl": 0.2}, {"off_policy_mask_threshold": 0.2}, {}),
    ({"max_off_policy_kl": 0.2}, {"off_policy_mask_threshold": 0.2}, {"sampled": tensors()["new"] + 0.5}),
    ({"kl_coef": 0.3, "kl_bias_correction": True}, {"beta": 0.3, "use_bias_correction_kl": True}, {}),
    ({"kl_coef": 0.3, "kl_bias_correction": True, "policy_loss": "sapo"},
     {"beta": 0.3, "use_bias_correction_kl": True, "loss_type": "sapo"} | SAPO, {}),
    ({"kl_coef": 0.3, "kl_bias_correction": True, "policy_loss": "gspo"},
     {"beta": 0.3, "use_bias_correction_kl": True, "importance_sampling_level": "sequence"}, {}),
    ({"kl_coef": 0.3, "kl_bias_correction": True, "policy_loss": "vespo"},
     {"beta": 0.3, "use_bias_correction_kl": True, "loss_type": "vespo"} | VESPO, {}),
    ({"top_entropy_quantile": 0.2}, {"top_entropy_quantile": 0.2}, {}),
    ({"top_entropy_quantile": 0.0}, {"top_entropy_quantile": 0.0}, {}),
    ({"top_entropy_quantile": 0.7, "kl_coef": 0.1, "aggregation": "token"},
     {"top_entropy_quantile": 0.7, "beta": 0.1, "loss_type": "dapo"}, {}),
    ({"top_entropy_quantile": 0.4, "mask_truncated": True}, {"top_entropy_quantile": 0.4}, CUT),
    ({"mask_truncated": True, "kl_coef": 0.1}, {"beta": 0.1}, CUT),
    ({"mask_truncated": True, "aggregation": "token"}, {"loss_type": "dapo"}, CUT),
    ({"mask_truncated": True, "aggregation": "constant"}, {"loss_type": "dr_grpo"}, CUT),
    ({"mask_truncated": True, "policy_loss": "vespo"}, {"loss_type": "vespo"} | VESPO, CUT),
    ({"mask_truncated": True, "policy_loss": "gspo", "aggregation": "sum"},
     {"loss_type": "luspo", "importance_sampling_level": "sequence"}, CUT),
])
def test_what_is_left_out_of_the_loss_and_how_the_kl_is_weighed_are_trl_s(ours, theirs, more) -> None:
    from trl import GRPOTrainer

    given = tensors() | more
    advantages = group_relative(given["scores"], True)
    agree(our_loss(given, **({"estimator": "grpo", "kl_coef": 0.0} | ours)),
          trl_loss(GRPOTrainer, given, advantages, **theirs))


def test_a_minibatch_of_truncated_responses_alone_is_a_loss_of_zero() -> None:
    given = tensors() | {"ended": torch.zeros(4, dtype=torch.bool)}
    for aggregation in ("token", "sequence", "constant", "sum"):
        loss, gradient, advantages = our_loss(given, estimator="grpo", mask_truncated=True, aggregation=aggregation,
                                              entropy_coef=0.1)
        assert loss == 0 and not gradient.any() and advantages.any()


SOURCES = [[1.0, 0.5, 2.0, -1.0, 3.0, 3.0, 3.0, None], [0.1, 0.9, None, 0.3, 0.2, 0.2, 0.7, None]]


@pytest.mark.parametrize(("estimator", "options"), [
    ("grpo", {"scale_rewards": "group"}), ("batch_grpo", {"scale_rewards": "batch"}),
    ("dr_grpo", {"scale_rewards": "none"}), ("gdpo", {"multi_objective_aggregation": "normalize_then_sum"})])
def test_advantages_of_two_reward_functions_are_trl_s(estimator, options) -> None:
    """Two groups of four; the last response has no score, and one response only the first function's."""
    weights = [0.5, 2.0]
    theirs = trl_advantages(tiny("causal"), SOURCES, 4, weights, **options)
    parts = [Part(SimpleNamespace(name=name, score=lambda _, scores=scores: scores), weight)
             for name, scores, weight in zip("ab", SOURCES, weights, strict=True)]
    rollout = Rollout.from_responses(Prompts([[5, 6]] * 8, ["x"] * 8), [[5, 1]] * 8, [True] * 8, 0, [])
    rollout.logprobs = torch.zeros(8, 2)
    rollout.scores = torch.tensor([math.nan if x is None else x for x in Mixture(parts).score(rollout)])
    config = PPOConfig(SamplingConfig(max_new_tokens=2, num_samples=4), estimator, kl_coef=0.0, missing_eos_penalty=0.0)
    trainer = PPOTrainer(Roles(actor=None), None, config, seed=0)
    trainer.shape(rollout)
    trainer.estimate(rollout, SimpleNamespace(add=lambda *_: None))
    ours = rollout.advantages[:, 0]
    torch.testing.assert_close(ours, torch.tensor(theirs), rtol=1e-5, atol=1e-5)
    assert ours.abs().max() > 0.5 and ours[-1] == 0


@pytest.mark.parametrize("is_normalised", [False, True])
def test_rloo_is_trl_s_with_the_ratio_of_the_whole_response_and_its_kl_in_the_reward(is_normalised) -> None:
    from trl import RLOOTrainer
    from trl.trainer.utils import nanstd

    given = tensors()
    rewards = given["scores"] - 0.05 * masked_rows(given["old"] - given["ref"])
    advantages = rewards - (rewards.sum() - rewards) / 3
    if is_normalised:  # as in TRL's _generate_and_score_completions
        advantages = (advantages - advantages.mean()) / (nanstd(advantages) + 1e-4)
    ours = our_loss(given, estimator="rloo", policy_loss="ppo_sequence", kl_coef=0.05, whiten_advantages=is_normalised)
    torch.testing.assert_close(ours[2], advantages, rtol=1e-6, atol=1e-6)
    agree(ours, trl_loss(RLOOTrainer, given, advantages))


def masked_rows(values: torch.Tensor) -> torch.Tensor:
    return torch.stack([masked_sum(v, m) for v, m in zip(values, MASK, strict=True)])


def test_every_estimator_is_in_the_table_that_these_tests_know() -> None:
    assert set(ESTIMATORS) == {"gae", "reinforce_pp", "reinforce_pp_baseline", "rloo", "grpo", "dr_grpo", "batch_grpo",
                               "gdpo",
                               "process_grpo"}  # TRL has no such; tests/algorithms/test_advantages.py
