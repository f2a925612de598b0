"""bfloat16 weights at ZeRO 0: fp32 masters and moments, stepped as plain torch steps fp32 weights."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engine.train import adamw_master, embedding_rows
from hybrid_rlhf.engine.train.accumulate import Rows, accumulate
from tests.factories.tiny import optimizer_step

STEPS = [(torch.randn(12, 6, generator=torch.Generator().manual_seed(s)).bfloat16(),
          5 * torch.randn(12, 1, generator=torch.Generator().manual_seed(9 + s))) for s in range(3)]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 1)).to(torch.bfloat16)


def trained(stage=0, pieces=(12,), module=None, **optimizer) -> tuple[HybridEngine, list[float]]:
    settings = OptimizerConfig(**{"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.3} | optimizer)
    engine = HybridEngine(module or net()).prepare_training(settings, lambda step: 1.0 / (1 + step), ZeroConfig(stage))
    return engine, [optimizer_step(engine, list(zip(x.split(pieces), y.split(pieces), strict=True)), lambda piece: loss(
        engine, *piece)) for x, y in STEPS]


def at_start() -> dict[str, torch.Tensor]:
    """The masters of `net` before any step."""
    engine = HybridEngine(net()).prepare_training(OptimizerConfig(), lambda step: 1.0, ZeroConfig(0))
    return engine.training.state()["weights"]


def loss(module, x, y):
    return ((module(x).float() - y) ** 2).sum() / 12


def by_hand(pieces) -> tuple[nn.Module, dict, list[float]]:
    """bf16 forward and backward of each piece, gradients summed in fp32, torch's AdamW on fp32 weights."""
    module, masters = net(), at_start()
    own = {n: nn.Parameter(masters[n]) for n, p in module.named_parameters()}
    assert all(torch.equal(own[n].bfloat16(), p) for n, p in module.named_parameters())
    groups = [{"params": [p for p in own.values() if p.ndim > 1], "weight_decay": 0.1},
              {"params": [p for p in own.values() if p.ndim <= 1], "weight_decay": 0.0}]
    optimizer, norms = torch.optim.AdamW(groups, lr=1), []
    for step, (x, y) in enumerate(STEPS):
        optimizer.zero_grad()
        for piece in zip(x.split(pieces), y.split(pieces), strict=True):
            module.zero_grad()
            loss(module, *piece).backward()
            for name, parameter in module.named_parameters():
                own[name].grad = parameter.grad.float() + (0 if own[name].grad is None else own[name].grad)
        norms.append(float(nn.utils.clip_grad_norm_(own.values(), 0.3)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(own[name])
    return module, {n: (p, optimizer.state[p]) for n, p in own.items()}, norms


@pytest.mark.parametrize("optim", ["adamw", "adamw_unfused"])
@pytest.mark.parametrize("pieces", [[12], [3, 4, 5]])
@pytest.mark.parametrize("piece", [7, 1 << 19])  # also where a tensor is stepped in parts
@pytest.mark.parametrize("is_on_cpu", [True, False])  # False: as on a card, many at once
def test_three_steps_are_those_of_torch_adamw_on_fp32_masters(pieces, optim, piece, is_on_cpu, monkeypatch):
    monkeypatch.setattr(adamw_master, "_PIECE", piece), monkeypatch.setattr(adamw_master, "_BATCH", piece)
    monkeypatch.setattr(adamw_master, "_is_on_cpu", lambda _tensor: is_on_cpu)
    engine, norms = trained(pieces=pieces, optim=optim)
    module, expected, their_norms = by_hand(pieces)
    assert engine.training.stage == 0
    assert norms == pytest.approx(their_norms, rel=1e-6)
    assert min(norms) > 0.3
    state = engine.training.state()
    for name, (weight, moments) in expected.items():
        torch.testing.assert_close(state["weights"][name], weight.detach(), rtol=1e-6, atol=1e-7)
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[key][name], moments[key], rtol=1e-5, atol=1e-8)
    for ours, theirs in zip(engine.module.parameters(), module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.grad is None


def test_zero_1_gives_the_same_state_to_the_rounding_of_its_gradients():
    ours, theirs = trained(0)[0].training.state(), trained(1)[0].training.state()
    for key in ("weights", "exp_avg", "exp_avg_sq"):
        assert ours[key].keys() == theirs[key].keys()
        for name, value in theirs[key].items():
            assert ours[key][name].dtype == value.dtype == torch.float32
            torch.testing.assert_close(ours[key][name], value, rtol=2e-2, atol=2e-4, msg=f"{key} of {name}")


def test_small_steps_add_up_in_the_masters_where_bfloat16_would_round_them_away():
    before = at_start()
    state = trained(learning_rate=1e-6, weight_decay=0.0)[0].training.state()
    moved = {n: (state["weights"][n] - before[n]).abs().max() for n in before}
    assert all(0 < float(m) < 3e-6 for m in moved.values()), moved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scattered_masters_round_to_their_weights_and_small_updates_show_in_the_mean(dtype):
    weights = (0.1 * torch.randn(1200, 1000, generator=torch.Generator().manual_seed(3))).to(dtype)
    weights[0, :6] = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-9, torch.finfo(dtype).max])
    weights[0, 6] = float("inf")
    noise = adamw_master.rounding_noise(dtype, torch.device("cpu"))
    assert len(noise) < weights.numel() and torch.equal(noise, adamw_master.rounding_noise(dtype, noise.device))
    masters, other = weights.float(), weights.float()
    adamw_master.scatter(masters, noise, 5000), adamw_master.scatter(other, noise, 5001)
    assert torch.equal(masters.to(dtype), weights) and not torch.equal(other, masters)
    assert not masters[0, :2].any()
    assert not (masters[0, 2:6] == weights[0, 2:6]).any()
    part, turned = weights.float().view(-1)[1_040_000:1_090_000].clone(), weights.float().t().contiguous().t()
    adamw_master.scatter(part, noise, 1_045_000)  # another process's part, and another layout of the memory
    adamw_master.scatter(turned, noise, 5000)
    assert torch.equal(part, masters.view(-1)[1_040_000:1_090_000])
    assert torch.equal(turned, masters)
    for update in (1e-6, -1e-5, 1e-4):  # the distance of neighbours at .1 is 5e-4 in bfloat16
        shown = ((masters + update).to(dtype).double() - weights.double())[1:].mean()
        assert float(shown) == pytest.approx(update, rel=0.15 if abs(update) < 1e-5 else 0.05)
        from_the_middle = ((weights.float() + update).to(dtype).double() - weights.double())[1:].mean()
        assert dtype != torch.bfloat16 or abs(float(from_the_middle)) < 0.7 * abs(update)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_that_is_less_than_bfloat16_can_show_is_seen_in_a_part_of_the_weights(stage):
    torch.manual_seed(1)
    module = nn.Linear(300, 200, bias=False).to(torch.bfloat16)  # uniform to .058
    before = module.weight.detach().clone()
    engine = HybridEngine(module).prepare_training(
        OptimizerConfig(learning_rate=2e-6, weight_decay=0.0), lambda step: 1.0, ZeroConfig(stage))
    optimizer_step(engine, [torch.ones(1, 300, dtype=torch.bfloat16)], lambda x: engine(x).sum())  # Adam: all by -2e-6
    with engine.active():
        moved = engine.training.parameters["weight"]
        full = engine.training.state()["weights"]["weight"].to(torch.bfloat16) if stage == 3 else moved.detach()
    change = (full - before).double()
    assert 0.001 < float((change != 0).double().mean()) < 0.1
    assert float(change.mean()) == pytest.approx(-2e-6, rel=0.2)


def test_an_optimizer_is_freed_with_its_engine():
    engine, _ = trained()
    optimizer = weakref.ref(engine.training._masters)
    engine.training.engine.destroy()
    del engine
    gc.collect()
    assert optimizer() is None


def test_a_failed_pass_leaves_no_sum_behind():
    engine, _ = trained()
    twin = copy.deepcopy(engine.training.state())
    x, y = STEPS[0]

    def failing(piece):
        if piece is None:
            raise ZeroDivisionError
        return loss(engine, *piece)

    with pytest.raises(ZeroDivisionError):
        optimizer_step(engine, [(x, y), None], failing)
    assert all(p.grad is None for p in engine.module.parameters())
    assert not engine.training._masters._summed
    assert torch.equal(engine.training.state()["weights"]["0.weight"], twin["weights"]["0.weight"])


def test_fp32_parameters_beside_bfloat16_ones_are_their_own_masters():
    module = net()
    module[3].float()
    module[2].register_forward_hook(lambda _module, _inputs, output: output.float())
    engine, _ = trained(module=module)
    state = engine.training.state()
    assert torch.equal(state["weights"]["3.weight"], module[3].weight)
    assert not torch.equal(state["weights"]["0.weight"], module[0].weight.float())
    assert "master" not in engine.training._optimizer.state[module[3].weight]


class Tied(nn.Module):
    """Looks tokens up, mixes, and predicts them by the same matrix (or by another); 2 is a padding token."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.mix = nn.Embedding(11, 8, padding_idx=2), nn.Linear(8, 8)
        self.head = self.embedding if is_tied else nn.Linear(8, 11, bias=False)

    def forward(self, ids):
        return nn.functional.linear(torch.tanh(self.mix(self.embedding(ids))), self.head.weight)


def test_the_rows_that_a_card_sums_without_a_wait_are_those_summed_here():
    """Each id as often as it was looked up, with the whole sum: added once, as add_rows does. Small integers: exact."""
    draw = torch.Generator().manual_seed(5)
    ids, rows = torch.randint(0, 7, (40,), generator=draw), torch.randint(-9, 9, (40, 4), generator=draw).bfloat16()
    expected = torch.zeros(9, 4)
    for token, row in zip(ids.tolist(), rows.float(), strict=True):
        expected[token] += row
    for found, sums in (embedding_rows.summed(ids, rows), embedding_rows.summed_in_place(ids, rows)):
        table = torch.ones(9, 4)
        table[found] = table[found] + sums
        assert torch.equal(table, expected + 1)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("pieces", [[6], [1, 2, 3]])
def test_an_embeddings_gradient_by_rows_is_the_dense_one(is_tied, pieces, monkeypatch):
    """Against torch's own dense gradient of the same pieces, added up in fp32."""
    ids = torch.randint(0, 11, (6, 9), generator=torch.Generator().manual_seed(3))
    module = Tied(is_tied).to(torch.bfloat16)
    plain = copy.deepcopy(module)

    def predicted(model, rows):
        logits = model(rows).float().flatten(0, 1)
        return nn.functional.cross_entropy(logits, (rows * 3 % 11).flatten(), reduction="sum")

    wanted = {}
    for piece in ids.split(pieces):
        plain.zero_grad()
        predicted(plain, piece).backward()
        for name, parameter in plain.named_parameters():
            wanted[name] = wanted.get(name, 0) + parameter.grad.float()
    engine = HybridEngine(module).prepare_training(OptimizerConfig(0.1), lambda step: 1.0, ZeroConfig(0))
    optimizer, found, calls = engine.training._masters, {}, []

    def noted(max_norm):
        found.update({n: optimizer._gradient(p).float().clone() for n, p in module.named_parameters()})
        return type(optimizer).clip(optimizer, max_norm)

    def counted(*given):
        calls.append(given)
        type(optimizer).add_rows(optimizer, *given)

    monkeypatch.setattr(optimizer, "clip", noted)
    monkeypatch.setattr(optimizer, "add_rows", counted)
    for _ in range(2):  # the second minibatch finds the first one's buffers
        engine.training._optimizer.param_groups[0]["lr"] = 0.0
        engine.training.set_learning_rate(0.0)
        calls.clear()
        optimizer_step(engine, ids.split(pieces), lambda rows: predicted(engine, rows))
        assert len(calls) == len(pieces)
        for name, gradient in wanted.items():
            assert (found[name] - gradient).norm() <= 0.01 * gradient.norm(), name
            assert not is_tied or name != "head.weight"
    if not is_tied:
        assert not found["embedding.weight"][2].any() and found["embedding.weight"].any()


def test_on_a_card_sums_go_with_the_step_or_the_failed_pass_and_the_numbers_stay(monkeypatch):
    kept, _ = trained(pieces=(3, 4, 5))
    monkeypatch.setattr(adamw_master, "_is_on_cpu", lambda _tensor: False)  # as if the weights were on a card
    dropped, norms = trained(pieces=(3, 4, 5))
    whole, same_norms = trained(pieces=(3, 4, 5))

    def held(engine):
        masters = engine.training._masters
        return sum("sum" in state for state in masters.state.values()), len(masters._spare)

    assert held(kept) == (6, 1) and held(dropped) == (0, 0)  # weight and bias of three layers, one buffer
    x, y = STEPS[0]
    dropped.training.backward(loss(dropped, x[:3], y[:3]), is_last=False)
    assert held(dropped)[0] == 6
    dropped.training.discard_gradients()
    assert held(dropped) == (0, 0) and same_norms == norms
    again = optimizer_step(dropped, [(x[:6], y[:6]), (x[6:], y[6:])], lambda piece: loss(dropped, *piece))
    assert again == optimizer_step(whole, [(x[:6], y[:6]), (x[6:], y[6:])], lambda piece: loss(whole, *piece))


def test_an_embedding_whose_gradient_comes_by_rows_is_not_named_as_one_without(caplog):
    def named(dtype):
        module = Tied(is_tied=False).to(dtype)
        engine = HybridEngine(module).prepare_training(OptimizerConfig(0.1), lambda step: 1.0, ZeroConfig(0))
        rows = Rows(torch.tensor([9, 9]), lambda index: (engine(torch.ones(len(index), 9, dtype=torch.long)).sum(), {}))
        caplog.clear()
        accumulate(engine, 100, rows)
        assert not torch.equal(module.embedding.weight, Tied(is_tied=False).to(dtype).embedding.weight)
        return caplog.messages

    assert named(torch.bfloat16) == named(torch.float32) == []
