"""Rows that begin alike are computed with that beginning once: the same numbers and gradients, from fewer tokens."""

from __future__ import annotations

import pytest
import torch

from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right
from hybrid_rlhf.data.collate import collate_pairs
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.models.shared_prefix import packing, prefix_groups
from hybrid_rlhf.roles import Actor, Critic, Reward
from hybrid_rlhf.roles.policy_module import PolicyModule
from hybrid_rlhf.rollout import Prompts, Rollout
from tests.factories.tiny import tiny_causal_lm, tiny_scalar_model

PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [5, 6, 7, 8, 9], [11, 12], [5, 6, 7, 8, 9], [21, 22, 23]]
RESPONSES = [[31, 32, 33], [34], [35, 36, 37, 38, 39, 40, 41], [42, 43], [44], [45, 46]]
DISTINCT = 5 + 2 + 3 + sum(map(len, RESPONSES))


def batch_of(prompts=PROMPTS, responses=RESPONSES) -> SequenceBatch:
    rows = [p + r for p, r in zip(prompts, responses, strict=True)]
    real = length_mask([len(r) for r in rows])
    return SequenceBatch(pad_right(rows, 0), real, real & ~length_mask([len(p) for p in prompts], real.shape[1]))


def plain(model, weights, prompts=PROMPTS, responses=RESPONSES) -> torch.Tensor:
    """sum_i weights_i log p_i of all response tokens, each row by the model's own forward alone."""
    found = []
    for prompt, response in zip(prompts, responses, strict=True):
        logprobs = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        found += [logprobs[len(prompt) + t - 1, token] for t, token in enumerate(response) if prompt or t]
    return torch.stack(found), (torch.stack(found) * weights).sum()


@pytest.mark.parametrize("kind, options", [
    ("llama", {}), ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
                             "embd_pdrop": 0.0}),
    ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}), ("qwen3", {"head_dim": 16}), ("gpt_neox", {}),
    ("mistral", {"sliding_window": 20}), ("mistral", {"sliding_window": 6})])  # shorter than all tokens; than a row
def test_log_probabilities_and_gradients_are_those_of_every_row_alone(kind, options):
    model, twin = (tiny_causal_lm(3, kind=kind, initializer_range=0.2, **options) for _ in range(2))
    module = PolicyModule(model)
    assert module.can_share()
    seen = []
    model.get_input_embeddings().register_forward_hook(lambda _m, given, _out: seen.append(given[0].numel()))
    weights = torch.linspace(-1, 2, sum(map(len, RESPONSES)))
    found = module(batch_of())
    (found.logprobs * weights).sum().backward()
    expected, loss = plain(twin, weights)
    loss.backward()
    assert seen == [DISTINCT]
    torch.testing.assert_close(found.logprobs, expected, rtol=1e-4, atol=1e-5)
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        if theirs.grad is not None:
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize("kind, options", [("llama", {}), ("mistral", {"sliding_window": 6})])
def test_what_different_prompts_have_in_common_is_computed_once_too(kind, options):
    """A system prompt of three tokens, beside a row without a prompt, whose first token is not predicted."""
    model, twin = (tiny_causal_lm(3, kind=kind, initializer_range=0.2, **options) for _ in range(2))
    prompts, responses = [*([47, 48, 49, *prompt] for prompt in PROMPTS), []], [*RESPONSES, [47, 48, 50]]
    module, seen = PolicyModule(model), []
    assert module.can_share()
    model.get_input_embeddings().register_forward_hook(lambda _m, given, _out: seen.append(given[0].numel()))
    weights = torch.linspace(-1, 2, sum(map(len, responses)) - 1)
    found = module(batch_of(prompts, responses))
    (found.logprobs * weights).sum().backward()
    expected, loss = plain(twin, weights, prompts, responses)
    loss.backward()
    assert seen == [3 + DISTINCT + 3]
    torch.testing.assert_close(found.logprobs, expected, rtol=1e-4, atol=1e-5)
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4), name
    assert prefix_groups(batch_of([[47, 48, 49, 1], [47, 48, 49, 2]], [[4, 5]] * 2)).tolist() == [0, 1]


@pytest.mark.parametrize("kind, options", [
    ("bloom", {"n_layer": 2, "n_head": 4, "hidden_size": 32}), ("mamba", {"state_size": 8}),
    ("llama", {"attn_implementation": "eager"})])
def test_models_that_mix_tokens_otherwise_compute_every_row_whole(kind, options):
    model = tiny_causal_lm(3, kind=kind, **options)
    module = PolicyModule(model)
    assert not module.can_share()
    before = module(batch_of()).logprobs
    expected = torch.cat([module(batch_of([p], [r])).logprobs for p, r in zip(PROMPTS, RESPONSES, strict=True)])
    torch.testing.assert_close(before, expected, rtol=1e-4, atol=1e-5)


def test_checkpointed_activations_share_in_the_backward_pass_too():
    """Twice, with another batch between: the layers of each are computed again with its own prefixes."""
    model, twin = (tiny_causal_lm(3, initializer_range=0.2) for _ in range(2))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module = PolicyModule(model.train())
    assert module.can_share()
    weights = torch.linspace(-1, 2, sum(map(len, RESPONSES)))
    model.train()
    found, _other = module(batch_of()), module(batch_of(PROMPTS[:4], RESPONSES[:4]))
    (found.logprobs * weights).sum().backward()
    expected, loss = plain(twin, weights)
    loss.backward()
    torch.testing.assert_close(found.logprobs, expected, rtol=1e-4, atol=1e-5)
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize("is_scalar", [False, True])
def test_rows_too_long_for_what_the_trial_saw_are_computed_one_by_one_and_it_is_said_once(is_scalar, caplog):
    """The trial passes with 32 different tokens; the second batch has 58, more than the window, whose mask is not known
    to be a window's with chunks beside it."""
    options = {"kind": "mistral", "sliding_window": 40, "attention_chunk_size": 64, "initializer_range": 0.2}
    model = (tiny_scalar_model if is_scalar else tiny_causal_lm)(3, **options)
    module = (ScalarModel if is_scalar else PolicyModule)(model)
    seen = []
    model.get_input_embeddings().register_forward_hook(lambda _m, given, _out: seen.append(given[0].shape[1]))

    def found(batch):
        return module(batch)[batch.loss_mask] if is_scalar else module(batch).logprobs

    batches = [batch_of(), batch_of(responses=[r * 3 for r in RESPONSES]), batch_of()]
    assert module.can_share()
    seen.clear()
    shared = [found(batch) for batch in batches * 2]
    assert seen == [DISTINCT, 58, 26, DISTINCT, DISTINCT, 58, 26, DISTINCT]  # 58 is tried, and then rows of 26
    module._can_share = False
    for own, batch in zip(shared, batches * 2, strict=True):
        torch.testing.assert_close(own, found(batch), rtol=1e-4, atol=1e-5)
    said = [r.getMessage() for r in caplog.records if "begin alike" in r.getMessage()]
    assert len(said) == 1 and said[0].endswith("where that cannot be shared (MistralAttention attends by a mask)")


def test_rows_that_share_too_little_are_left_as_they_are():
    assert packing(batch_of([[1], [2], [3]], [[4, 5]] * 3)) is None
    assert prefix_groups(batch_of([[1, 2], [1, 3], [4, 5]], [[4, 5]] * 3)) is None
    assert prefix_groups(batch_of()).tolist() == [0, 1, 0, 1, 0, 5]


def actor(max_tokens: int, shares: bool) -> Actor:
    model = tiny_causal_lm(3, initializer_range=0.2)
    module = PolicyModule(model)
    module._can_share = None if shares else False
    engine = HybridEngine(module, model, pad_id=0).prepare_training(
        OptimizerConfig(learning_rate=1e-2, optim="sgd", max_grad_norm=1e9), lambda step: 1.0, ZeroConfig())
    return Actor(engine, None, max_tokens)


@pytest.mark.parametrize("max_tokens", [8192, 24])
def test_an_actor_s_update_does_not_move_with_sharing_or_the_token_budget(max_tokens):
    rollout = Rollout.from_responses(Prompts(PROMPTS, [""] * 6), RESPONSES, [False] * 6, 0, [""] * 6)
    first, second = actor(max_tokens, True), actor(8192, False)

    def loss(tokens, rows, totals):
        return -(tokens.logprobs * (rows.response_ids[rows.action_mask] % 3 - 1)).sum() / totals.num_actions, {}

    torch.testing.assert_close(first.logprobs(rollout), second.logprobs(rollout), rtol=1e-4, atol=1e-5)
    norms = [a.update(rollout, loss).compute()["grad_norm"] for a in (first, second)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0] > 0.1
    for mine, theirs in zip(first.engine.model.parameters(), second.engine.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


PAIRS = [([5, 6, 7, 8, 9], [31, 32, 33], [34]), ([11, 12], [35, 36, 37, 38, 39, 40, 41], [42, 43]),
         ([21, 22, 23, 24, 25, 26, 27, 28, 29, 30], [44, 45, 46, 47], [44, 45, 50, 51, 52, 53, 54, 55, 56])]


def pair_batch():
    return collate_pairs([{"chosen_ids": p + c, "rejected_ids": p + r, "num_prompt_tokens": len(p)}
                          for p, c, r in PAIRS], 0)


@pytest.mark.parametrize("kind, options", [("llama", {}), ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4,
                                                                     "resid_pdrop": 0.0, "embd_pdrop": 0.0,
                                                                     "attn_pdrop": 0.0}), ("qwen3", {"head_dim": 16})])
def test_scores_of_pairs_and_their_gradients_are_those_of_every_row_alone(kind, options):
    """The oracle is transformers' own classifier on one row at a time, the loss written out."""
    model, twin = (tiny_scalar_model(3, kind=kind, initializer_range=0.2, **options) for _ in range(2))
    reward = Reward(HybridEngine(ScalarModel(model), pad_id=0))
    seen = []
    model.get_input_embeddings().register_forward_hook(lambda _m, given, _out: seen.append(given[0].numel()))
    scores = reward.score(pair_batch().sequences)
    assert seen[-1] == sum(map(len, sum(PAIRS, ())))  # the prompts once
    module, batch = reward.engine.module, pair_batch().sequences
    mine = module(batch).gather(1, batch.attention_mask.sum(1)[:, None] - 1)[:, 0]
    rows = [p + c for p, c, _ in PAIRS] + [p + r for p, _, r in PAIRS]
    alone = torch.cat([twin(torch.tensor([row])).logits[0] for row in rows])
    for found in (mine, alone):
        torch.nn.functional.softplus(found[3:] - found[:3]).mean().backward()
    torch.testing.assert_close(scores, alone.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine, alone, rtol=1e-5, atol=1e-5)
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5), name


def scalar_engine(shares: bool) -> HybridEngine:
    module = ScalarModel(tiny_scalar_model(3, initializer_range=0.2))
    module._can_share = None if shares else False
    return HybridEngine(module, pad_id=0).prepare_training(
        OptimizerConfig(learning_rate=1e-2, optim="sgd", max_grad_norm=1e9), lambda step: 1.0, ZeroConfig())


def test_a_critic_s_step_does_not_move_with_sharing():
    rollout = Rollout.from_responses(Prompts(PROMPTS, [""] * 6), RESPONSES, [False] * 6, 0, [""] * 6)
    first, second = (Critic(scalar_engine(shares), 64) for shares in (True, False))

    def loss(values, rows, totals):
        return (values - rows.response_ids[rows.action_mask] % 3).square().sum() / totals.num_actions, {}

    torch.testing.assert_close(first.values(rollout), second.values(rollout), rtol=1e-5, atol=1e-5)
    for critic in (first, second):
        critic.update(rollout, loss)
    for mine, theirs in zip(first.engine.module.parameters(), second.engine.module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
