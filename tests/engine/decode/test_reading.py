"""Hidden states of given sequences in inference mode are those of the model's plain forward."""

from __future__ import annotations

import pytest
import torch

from hybrid_rlhf.engine.hybrid import HybridEngine
from tests.factories.architectures import build


def _sequences() -> list[list[int]]:
    draws = torch.Generator().manual_seed(0)
    first, second = (torch.randint(5, 97, (n,), generator=draws).tolist() for n in (20, 33))
    return [first, second, [7], second[:15] + first, second[:4]]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "bloom", "deepseek_v3", "mamba", "jamba"])
def test_states_give_the_logits_of_the_plain_forward_whatever_was_read_before(kind):
    model = build(kind)
    sequences = _sequences()
    with torch.no_grad():
        want = [model.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
                for ids in sequences]
    engine = HybridEngine(model, model, eos_ids=[2])
    with engine.inference():
        reader = engine.read(64)
        for ids, whole in zip(sequences, want, strict=True):
            first = max(0, min(reader.num_held(ids), len(ids)) - 1)
            assert torch.allclose(reader.states(ids, first), whole[first:], rtol=1e-3, atol=1e-3 * whole.abs().max())


def test_what_two_sequences_begin_with_is_read_once(monkeypatch):
    model = build("llama")
    engine = HybridEngine(model, model, eos_ids=[2])
    with engine.inference():
        reader, widths = engine.read(64), []
        model.base_model.register_forward_pre_hook(
            lambda _module, _given, named: widths.append(named["input_ids"].shape[1]), with_kwargs=True)
        reader.states([5, 6, 7, 8, 9])
        assert (reader.num_held([5, 6, 7, 1]), reader.num_held([1])) == (3, 0)
        reader.states([5, 6, 7, 1, 2], 3)
        assert widths == [5, 2] and reader.num_held([5, 6, 7, 8]) == 3
        with pytest.raises(ValueError, match="are held"):
            reader.states([5, 9, 9], 2)
        with pytest.raises(ValueError, match="slot of 64"):
            reader.states([5] * 65)
    with pytest.raises(RuntimeError, match="outside inference"):
        engine.read(4)
