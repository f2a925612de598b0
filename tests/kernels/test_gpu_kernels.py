"""The Triton kernels against their definition in torch: on a card, or on the processor where Triton is interpreted
(TRITON_INTERPRET=1 before Triton is imported; tests/kernels/test_kernels_triton.py runs this file so).
"""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch

from hybrid_rlhf.kernels import reference

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
HAS_DEVICE = IS_INTERPRETED or torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_DEVICE, reason="no card"),
              pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # numpy's, of NaN
              pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")]
# Largest difference from the definition for outputs of size about 1. The interpreter cuts bf16 where cards round.
BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 2.0 ** (-5 if IS_INTERPRETED else -6), torch.float16: 2.0**-9}
SHAPES = [(4, 2, 8, 8), (2, 2, 64, 64), (20, 1, 48, 40), (3, 3, 5, 3)]
MORE_SHAPES = [(32, 32, 64, 64), (32, 8, 64, 64), (32, 8, 128, 128), (71, 1, 64, 64), (8, 4, 256, 256),
               (40, 40, 128, 128), (4, 2, 192, 128), (6, 2, 80, 80)]
CASES = (list(zip(SHAPES, (torch.float16, torch.bfloat16, torch.float16, torch.float32), strict=True)) if IS_INTERPRETED
         else list(itertools.product(SHAPES + MORE_SHAPES, BOUNDS)))
OPTIONS = list(itertools.product((False, True), (False, True), (None, 5.0)))


def case(heads, kv_heads, dim, value_dim, dtype, positions, seed=0, columns=0, page=None):
    """Positional arguments of decode_attention: random tokens and caches for rows at the given positions. page: its
    columns; None: a page holds all of a row."""
    g = torch.Generator().manual_seed(seed)
    batch, width = len(positions), max(positions) + 1

    def draw(*shape):
        return torch.randn(*shape, generator=g).to(DEVICE, dtype)

    columns = columns or width + 5
    per_row = 1 if page is None else -(-columns // page)
    pages = torch.randperm(batch * per_row + 2, generator=g)[:-2].view(batch, per_row).to(DEVICE)
    query = draw(batch, 1, heads, dim).transpose(1, 2)  # as models make it: not contiguous
    caches = (draw(batch * per_row + 2, kv_heads, page or columns, d) for d in (dim, value_dim))
    return [query, draw(batch, kv_heads, 1, dim), draw(batch, kv_heads, 1, value_dim), *caches, pages,
            torch.tensor(positions, device=DEVICE), width]


def both(ops, inputs, **settings):
    """(ours, the definition's) results; asserts that both left the same caches behind."""
    mine, theirs = ([x.clone() if i in (3, 4) else x for i, x in enumerate(inputs)] for _ in range(2))
    settings.setdefault("scaling", inputs[0].shape[-1] ** -0.5)
    ours, want = ops.decode_attention(*mine, **settings), reference.decode_attention(*theirs, **settings)
    assert torch.equal(mine[3], theirs[3]) and torch.equal(mine[4], theirs[4])
    assert ours.dtype == want.dtype and ours.shape == want.shape and ours.is_contiguous()
    return ours.float(), want.float()


@pytest.mark.parametrize("heads", [2, 4], ids=["single", "grouped"])
@pytest.mark.parametrize("last", [300, 900], ids=["whole", "parts"])
def test_rows_in_pages_are_the_definitions_and_may_begin_with_the_same_ones(ops, heads, last):
    for masked in (False, True):
        inputs = case(heads, 2, 16, 16, torch.float16, [last, 128, -1, 127, 260, 0], page=128)
        inputs[5][1, 0] = inputs[5][4, 0] = inputs[5][0, 0]
        ours, want = both(ops, inputs, **options_of(inputs, masked, False, None))
        assert (ours - want).abs().max() < BOUNDS[torch.float16] and not ours[2].any()
    with pytest.raises(ValueError, match="pages of 24 columns"):
        both(ops, case(heads, 2, 16, 16, torch.float16, [last, 3], page=24))


def options_of(inputs, masked, has_sinks, softcap):
    g = torch.Generator().manual_seed(1)
    mask = (torch.rand(len(inputs[6]), inputs[7], generator=g) < 0.7).to(DEVICE) if masked else None
    return dict(mask=mask, sinks=torch.randn(inputs[0].shape[1], generator=g).to(DEVICE) if has_sinks else None,
                softcap=softcap)


@pytest.mark.parametrize("shape, dtype", CASES, ids=str)
def test_attention_is_the_definitions_for_every_option(ops, shape, dtype):
    positions = [0, 40, -1, 140] if IS_INTERPRETED else [0, 3, -1, 40, 140, 63, 64, 65, 1500, 127, 128, 129]
    is_brief = IS_INTERPRETED or shape in MORE_SHAPES  # every option is compiled, which takes a second
    for options in OPTIONS[:: 7 if is_brief else 1]:  # none of them, and all
        inputs = case(*shape, dtype, positions)
        ours, want = both(ops, inputs, **options_of(inputs, *options))
        assert (ours - want).abs().max() < BOUNDS[dtype], options
        assert not ours[2].any()  # the idle row


@pytest.mark.parametrize("dtype", [torch.float16] if IS_INTERPRETED else list(BOUNDS), ids=str)
@pytest.mark.parametrize("rows", [3] if IS_INTERPRETED else [1, 3, 64])
def test_a_long_context_is_read_in_parts_that_give_the_same(ops, rows, dtype):
    positions = [700, 0, -1, *range(1, 62)][:rows]
    for options in OPTIONS[:: 7 if IS_INTERPRETED else 1]:
        inputs = case(4, 2, 16, 16, dtype, positions)
        ours, want = both(ops, inputs, **options_of(inputs, *options))
        assert (ours - want).abs().max() < BOUNDS[dtype], options


@pytest.mark.skipif(not IS_INTERPRETED, reason="a card takes its own form; each is compiled by compile_kernels.py")
@pytest.mark.parametrize("kib, has_matrix_units", [(227, True), (99, True), (64, False)], ids=["H100", "RTX", "Turing"])
@pytest.mark.parametrize("shape", [(8, 2, 64, 64), (40, 1, 128, 128), (20, 1, 256, 256), (4, 2, 192, 128),
                                   (3, 1, 512, 512), (3, 1, 576, 512)], ids=str)
def test_attention_is_the_definitions_in_the_form_of_every_card(ops, monkeypatch, kib, has_matrix_units, shape):
    from hybrid_rlhf.kernels import triton_attention

    card = triton_attention.Card(16, kib * 1024, has_matrix_units)
    monkeypatch.setattr(triton_attention, "card_of", lambda _device: card)
    for dtype in (torch.float16, torch.float32):
        ours, want = both(ops, case(*shape, dtype, [0, 40, -1, 70]))
        assert (ours - want).abs().max() < BOUNDS[dtype]


def test_attention_is_right_at_the_lengths_around_a_tile_and_where_the_graph_is_wider(ops):
    for length in (1, 64, 65) if IS_INTERPRETED else (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257):
        inputs = case(2, 1, 16, 16, torch.float16, [length - 1], seed=length, columns=900)
        inputs[7] = 900  # a captured step looks at all columns there are
        ours, want = both(ops, inputs)
        assert (ours - want).abs().max() < BOUNDS[torch.float16]


def test_attention_of_two_columns_by_hand(ops):
    """Scores 0 and ln 3 give weights 1/4 and 3/4 of values 4 and 8; with a sink of ln 4, 1/8 and 3/8."""
    keys, values = torch.zeros(1, 1, 2, 1, device=DEVICE), torch.tensor([[[[4.0], [0.0]]]], device=DEVICE)
    one = torch.ones(1, 1, 1, 1, device=DEVICE)
    new = dict(key=one * math.log(3), value=one * 8, keys=keys, values=values, pages=torch.tensor([[0]], device=DEVICE),
               positions=torch.tensor([1], device=DEVICE), width=2)
    assert ops.decode_attention(one, **new, scaling=1.0).item() == pytest.approx(7.0)
    sinks = torch.tensor([math.log(4)], device=DEVICE)
    assert ops.decode_attention(one, **new, scaling=1.0, sinks=sinks).item() == pytest.approx(3.5)
    assert keys.flatten().tolist() == pytest.approx([0, math.log(3)]) and values.flatten().tolist() == [4, 8]


@pytest.mark.parametrize("heads", [2, 4], ids=["single", "grouped"])
@pytest.mark.parametrize("columns", [50, 300], ids=["whole", "parts"])
def test_columns_outside_the_mask_are_not_read_and_broken_ones_inside_show(ops, heads, columns):
    inputs = case(heads, 2, 16, 16, torch.float16, [columns, 9])
    window = torch.arange(inputs[7], device=DEVICE) > inputs[6][:, None] - 8
    inputs[3][inputs[5][0], :, : columns - 8] = float("nan")
    inputs[4][inputs[5][0], :, : columns - 8] = float("nan")
    assert ops.decode_attention(*inputs, scaling=0.25, mask=window).isfinite().all()
    inputs[3][inputs[5][1], 0, 2, 3] = float("nan")
    out = ops.decode_attention(*inputs, scaling=0.25, mask=window)[1, 0]
    assert out[: heads // 2].isnan().all() and out[heads // 2:].isfinite().all()


def test_a_row_that_may_read_nothing_gives_zeros_and_one_whose_scores_are_all_minus_infinity_does_not(ops):
    for heads, columns, sinks in itertools.product((2, 4), (7, 300), (None, 1)):
        sinks = None if sinks is None else torch.ones(heads, device=DEVICE)
        inputs = case(heads, 2, 16, 16, torch.float16, [columns - 1, columns - 2])
        nothing = torch.zeros(2, columns, dtype=torch.bool, device=DEVICE)
        assert not ops.decode_attention(*inputs, scaling=0.25, mask=nothing, sinks=sinks).any()
        inputs[0][:], inputs[1][:], inputs[3][:] = 1.0, float("-inf"), float("-inf")
        broken = ops.decode_attention(*inputs, scaling=0.25, sinks=sinks)
        assert (broken.isnan().all() if sinks is None else not broken.any())  # as the definition has it


def test_caches_and_new_tokens_may_be_views_and_differ_in_dtype(ops):
    inputs = case(4, 2, 16, 16, torch.float32, [11, 30, 2])
    inputs[3] = inputs[3].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)  # (S, K, C, D) stored as (C, S, K, D)
    inputs[0] = inputs[0].mT.contiguous().mT
    ours, want = both(ops, inputs)
    assert (ours - want).abs().max() < 5e-6
    inputs[0], inputs[1] = inputs[0].half(), inputs[1].half()
    inputs[2], inputs[4] = inputs[2].half(), inputs[4].half()
    ours, want = both(ops, inputs)
    assert (ours - want).abs().max() < 2e-3
    inputs[4] = inputs[4].mT.contiguous().mT
    with pytest.raises(ValueError, match="the last must be 1"):
        ops.decode_attention(*inputs, scaling=0.25)
