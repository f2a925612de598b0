"""The simulated card itself: it refuses, counts and runs out as a card does. Expected numbers are torch's own rules."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch

from hybrid_rlhf import kernels
from tests.factories.tiny import tiny_causal_lm
from tests.simulated_card import AMPERE, HOPPER, Wait, simulated_card
from tests.simulated_card.allocator import MIB, Allocator

CUDA = torch.device("cuda", 0)


@pytest.fixture
def card():
    with simulated_card() as made:
        yield made
    assert not torch.cuda.is_available()


def test_a_model_trains_and_generates_there_as_on_the_processor(card):
    ids = torch.randint(0, 300, (4, 16), generator=torch.Generator().manual_seed(0))
    weights = {}
    for device in ("cpu", "cuda"):
        model = tiny_causal_lm(num_key_value_heads=4).to(device)  # no fused kernel takes grouped heads in fp32
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        inputs = ids.to(device)
        for _ in range(2):
            model(input_ids=inputs, labels=inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        drawn = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=4, do_sample=False)
        assert str(drawn.device).startswith(device) and str(model.device).startswith(device)
        weights[device] = [p.detach().cpu() for p in model.parameters()], drawn.cpu()
    assert all(torch.equal(a, b) for a, b in zip(weights["cpu"][0], weights["cuda"][0], strict=True))
    assert torch.equal(weights["cpu"][1], weights["cuda"][1])


@pytest.mark.parametrize("mix", [
    lambda x: x + torch.ones(3), lambda x: torch.cat([x, torch.ones(3)]), lambda x: torch.ones(2, 3) @ x,
    lambda x: x.gather(0, torch.tensor([1])), lambda x: torch.where(torch.ones(3) > 0, x, x),
    lambda x: torch.zeros(3).index_copy_(0, torch.tensor([0]), x[:1])])
def test_an_operation_that_mixes_devices_fails(card, mix):
    with pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and cpu!"):
        mix(torch.ones(3, device="cuda"))


@pytest.mark.parametrize(("wait", "kind"), [
    (lambda x: x.sum().item(), "local_scalar_dense"), (lambda x: x.tolist(), "tolist"), (lambda x: bool(x.any()), ""),
    (lambda x: x.nonzero(), "nonzero"), (lambda x: x[x > 0], "index by a mask"), (lambda x: x.unique(), "unique"),
    (lambda x: x.cpu(), "copy from the card"), (lambda x: torch.ones(2, device="cpu").to(x.device), "copy to the card"),
    (lambda x: torch.tensor([1.0], device=x.device), "pageable"), (lambda x: x.masked_select(x > 0), "masked_select"),
    (lambda x: torch.empty(2).copy_(x[:2], non_blocking=True), "pageable"), (lambda x: x[torch.tensor([0])], "index"),
    (lambda x: torch.cuda.synchronize(), "synchronize"), (lambda x: torch.equal(x, x), "equal"),
    (lambda x: x.repeat_interleave(torch.ones_like(x).long()), "repeat_interleave")])
def test_every_wait_is_counted(card, wait, kind):
    x = torch.arange(3.0, device="cuda")
    card.reset()
    wait(x)
    assert any(kind in found for found, _ in card.waits), card.waits


@pytest.mark.parametrize("step", [
    lambda x: x.softmax(-1), lambda x: x.new_zeros(2), lambda x: torch.zeros(2, device=x.device).copy_(x[:2]),
    lambda x: torch.where(x > 1, x, -1.0), lambda x: torch.arange(4, device=x.device), lambda x: x.max(),
    lambda x: torch.ones(3).pin_memory().to(x.device, non_blocking=True), lambda x: x.index_select(0, x[:1].long())])
def test_what_needs_no_wait_is_none(card, step):
    x = torch.arange(3.0, device="cuda")
    card.reset()
    step(x)
    assert not card.waits and sum(card.launches.values()) > 0


@pytest.mark.parametrize(("profile", "splits"), [(AMPERE, False), (HOPPER, True)], ids=["8.6", "9.0"])
def test_launches_are_those_of_the_programs_around_the_kernels(profile, splits):
    """200 programs of 128 columns are two for each of 82 processors, and too few for 132: twice as many, and a join."""
    pytest.importorskip("triton")
    with simulated_card(**profile) as card, torch.no_grad():
        ops = kernels.ops_for("cuda")
        query, key = (torch.randn(100, heads, 1, 16, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
        cache, pages = torch.randn(2, 100, 2, 256, 16, device="cuda", dtype=torch.bfloat16), torch.arange(100)[:, None]
        positions, angles = torch.zeros(100, dtype=torch.long, device="cuda"), torch.randn(1, 1, 16, device="cuda")
        pages, logits = pages.to("cuda"), torch.randn(100, 64, device="cuda")
        for run, launches in (
                (lambda: ops.fused.rotary(query, key, angles, angles), {"_turn": 2}),
                (lambda: ops.decode_attention(query, key, key, *cache.unbind(0), pages, positions, 256, scaling=0.25),
                 {"_attend_grouped": 1} | ({"_join": 1} if splits else {})),
                (lambda: ops.sample(logits, positions, positions), {"_scan": 1, "_draw": 1}),
                (lambda: ops.sample(logits, positions, positions, top_p=0.9), {"_scan": 2, "_cut": 1, "_draw": 1})):
            card.reset()
            run()
            assert dict(card.launches) == launches


# -- memory -----------------------------------------------------------------------------------------------------------


def test_blocks_are_rounded_split_and_joined_again_as_by_torchs_allocator():
    memory = Allocator(100 * MIB)
    small = memory.take(1)
    assert (memory.allocated, memory.reserved) == (512, 2 * MIB)
    large = memory.take(3 * MIB)  # of a segment of 20 MiB
    assert memory.reserved == 22 * MIB
    second = memory.take(16 * MIB + 512 * 1024)  # the rest of it
    assert memory.reserved == 22 * MIB and large.segment is second.segment
    huge = memory.take(33 * MIB)  # rounded to 2 MiB
    assert memory.reserved == (22 + 34) * MIB
    for block in (large, second):
        memory.give_back(block)
    assert memory.take(19 * MIB).segment is large.segment  # one piece again
    memory.give_back(huge)
    assert memory.reserved == 56 * MIB
    memory.release()
    assert memory.reserved == 22 * MIB and small.asked == 1


def test_memory_runs_out_after_unused_segments_went_back_but_not_during_a_capture(card):
    gib = 1 << 30
    kept = torch.empty(6 * gib, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info() == (3 * gib // 2, 8 * gib)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2048\.00 MiB"):
        torch.empty(2 * gib, dtype=torch.uint8, device="cuda")
    del kept
    assert torch.cuda.memory_reserved() == 6 * gib and torch.cuda.memory_allocated() == 0
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(4 * gib, dtype=torch.uint8, device="cuda")
    graph.capture_end()
    torch.empty(7 * gib, dtype=torch.uint8, device="cuda")


def test_memory_comes_back_with_the_last_tensor_that_looks_into_it(card):
    whole = torch.zeros(1000, 1000, device="cuda")
    view = whole[:1]
    used = torch.cuda.memory_allocated()
    assert used == -(-4_000_000 // 512) * 512
    del whole
    assert torch.cuda.memory_allocated() == used
    del view
    gc.collect()
    assert torch.cuda.memory_allocated() == 0 and torch.cuda.max_memory_allocated() == used


# -- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "each"), [  # bytes beside values and places
    ((300, 4096), 0), ((1, 5000), 4 + 8 + 8), ((2, 5000), 4 + 8 + 16), ((300, 5000), 4 + 8 + 8)])
def test_a_sort_of_long_rows_takes_a_second_copy_and_places(card, shape, each):
    x = torch.randn(shape, device="cuda")
    before = card.memory.allocated
    kept = x.sort(dim=-1, stable=True)
    assert kept.values.shape == shape
    assert card.memory.peak - before == pytest.approx(x.numel() * (4 + 8 + each), rel=0.03)


@pytest.mark.parametrize(("profile", "mebibytes"), [(AMPERE, 8.125), (HOPPER, 32)], ids=["8.6", "9.0"])
def test_the_first_product_takes_a_buffer_that_stays(profile, mebibytes):
    with simulated_card(**profile) as card:
        x = torch.ones(4, 4, device="cuda")
        before = card.memory.allocated
        for _ in range(2):
            x.mm(x)
        assert card.memory.allocated - before == mebibytes * MIB


def captured(step):
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        kept = step()
    finally:
        graph.capture_end()
    return graph, kept


def test_nothing_happens_while_recording_and_everything_at_a_replay(card):
    x, total = torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")
    graph, product = captured(lambda: (total.add_(x * 2), x * 3)[1])
    assert total.tolist() == [0, 0]
    x.fill_(5)
    graph.replay()
    graph.replay()
    assert total.tolist() == [20, 20] and product.tolist() == [15, 15]


@pytest.mark.parametrize("step", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x.cpu(),
                                  lambda x: x + torch.tensor([1.0, 2.0], device="cuda"),
                                  lambda _: torch.cuda.synchronize()])
def test_a_wait_is_not_permitted_while_recording(card, step):
    x = torch.ones(2, device="cuda")
    with pytest.raises(Wait, match="not permitted when stream is capturing"):
        captured(lambda: step(x))


def test_a_graph_of_memory_that_is_gone_or_moved_is_an_error(card):
    x, y = torch.ones(2, device="cuda"), torch.ones(2, device="cuda")
    graph, _ = captured(partial(y.add_, x))
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(1 << 20)
    with pytest.raises(RuntimeError, match="moved"):
        graph.replay()
    del x
    gc.collect()
    with pytest.raises(RuntimeError, match="given back"):
        graph.replay()
