"""Attention on a card: torch's fused kernels are reached, and few shapes are."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from hybrid_rlhf.core.tensors import SequenceBatch, length_mask
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.engine.decode.attention import dense_attention
from hybrid_rlhf.engine.train.patches import training_forms
from hybrid_rlhf.models.shared_prefix import distinct_states, packing
from tests.factories.tiny import tiny_causal_lm
from tests.simulated_card import simulated_card


@pytest.fixture
def asked(monkeypatch) -> list[tuple[bool, bool]]:
    """(has a mask, has grouped heads) of each call of torch's attention."""
    found, own = [], functional.scaled_dot_product_attention

    def noted(query, key, value, *given, **named):
        found.append((named.get("attn_mask") is not None, query.shape[1] != key.shape[1]))
        return own(query, key, value, *given, **named)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    return found


def by_hand(query, key, value, mask) -> torch.Tensor:
    key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
    scores = (query @ key.mT / 4).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


EACH_CARD = pytest.mark.parametrize("capability, dtype", [
    ((7, 5), torch.float32), ((7, 5), torch.float16), ((8, 6), torch.float32), ((8, 6), torch.bfloat16),
    ((9, 0), torch.bfloat16)], ids=str)


@EACH_CARD
@pytest.mark.parametrize("heads", [None, 1, 4])  # of the mask; None: causal
def test_grouped_heads_reach_a_fused_kernel(asked, capability, heads, dtype):
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, 6, 16, generator=draw).to(dtype) for n in (4, 2, 2))
    mask = None if heads is None else torch.rand(2, heads, 6, 6, generator=draw) > 0.3
    seen = torch.ones(6, 6, dtype=torch.bool).tril() if mask is None else mask | torch.eye(6, dtype=torch.bool)
    mask = None if mask is None else seen
    with simulated_card(capability=capability):
        found = dense_attention(*(t.to("cuda") for t in (query, key, value)), mask if mask is None else mask.to("cuda"),
                                scaling=0.25).cpu()
    wanted = by_hand(*(t.float() for t in (query, key, value)), seen)
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.03)
    # with a mask, in fp32 and before Ampere none takes grouped heads
    assert asked == [(mask is not None, mask is None and dtype == torch.bfloat16)]


@EACH_CARD
def test_a_mask_over_many_columns_makes_no_scores(capability, dtype):
    """Of 64 queries, 16 heads and 4096 columns scores in fp32 take 16 MiB, 4 GiB of 256 times as many queries."""
    query, key, value = (torch.zeros(1, heads, length, 16, dtype=dtype)
                         for heads, length in ((16, 64), (4, 4096), (4, 4096)))
    with simulated_card(capability=capability) as card:
        given = [t.to("cuda") for t in (query, key, value, torch.ones(1, 1, 64, 4096, dtype=torch.bool))]
        before = card.memory.allocated
        dense_attention(*given, scaling=0.25)
        assert card.memory.peak - before < 8 << 20
        assert card.launches["_safe_softmax"] == 0


@EACH_CARD
def test_training_makes_no_scores_for_grouped_heads(capability, dtype):
    """transformers leaves groups to torch without a mask; in fp32 and before Ampere no fused kernel takes them."""
    model, ids = tiny_causal_lm(num_key_value_heads=2).to(dtype), torch.arange(5, 69)[None]
    with simulated_card(capability=capability) as card:
        model, ids = model.to("cuda"), ids.to("cuda")
        with training_forms(model):
            model(input_ids=ids, labels=ids).loss.backward()
        assert card.launches["_scaled_dot_product_flash_attention_for_cpu"] == 2  # of two layers
        assert card.launches["_safe_softmax"] == 0


@pytest.mark.parametrize("shape", [(2, 1, 1, 6), (1, 1, 1, 6), (1, 1, 6, 6)])
def test_a_mask_for_all_queries_or_rows_is_one_for_each(card, shape):
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, 6, 16, generator=draw) for n in (4, 2, 2))
    mask = torch.rand(shape, generator=draw) > 0.3
    mask[..., 0] = True
    found = dense_attention(*(t.to("cuda") for t in (query, key, value)), mask.to("cuda"), scaling=0.25).cpu()
    torch.testing.assert_close(found, by_hand(query, key, value, mask))


def ragged(seed: int, device: str) -> SequenceBatch:
    """Four responses of 20 to 180 tokens to each of four prompts of 30 to 110."""
    draw = torch.Generator().manual_seed(seed)
    prompts = torch.randint(30, 110, (4,), generator=draw).repeat_interleave(4)
    lengths = prompts + torch.randint(20, 180, (16,), generator=draw)
    ids = torch.randint(5, 60, (16, int(lengths.max())), generator=draw)
    for i in range(16):
        ids[i, : prompts[i]] = ids[i // 4 * 4, : prompts[i]]
    real, width = length_mask(lengths), ids.shape[1]
    return SequenceBatch(ids * real, real, real & ~length_mask(prompts, width)).to(device)


def test_ragged_micro_batches_that_share_prefixes_have_few_shapes(card):
    blocks = [packing(ragged(seed, "cuda")).blocks for seed in range(30)]
    assert max(map(len, blocks)) <= 3
    assert len({block for found in blocks for block in found}) <= 30
    assert len({block for seed in range(30) for block in packing(ragged(seed, "cpu")).blocks}) > 100
    for seed, found in enumerate(blocks):  # padding, which the backward pass keeps, is bounded
        tokens = int(ragged(seed, "cpu").attention_mask.sum())
        assert sum(rows * width for rows, width in found) <= 1.6 * tokens


def test_their_states_are_those_of_the_processor(card):
    states = []
    for device in ("cpu", "cuda"):
        batch, model = ragged(0, device), tiny_causal_lm().to(device)
        packed = packing(batch)
        with torch.no_grad():
            states.append(distinct_states(model, batch, packed).index_select(0, packed.predicting(batch)).cpu())
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)


def test_attention_that_plans_for_each_shape_is_off(card):
    torch.backends.cuda.enable_cudnn_sdp(True)
    HybridEngine(tiny_causal_lm().to("cuda"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
