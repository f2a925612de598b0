"""Weights in parts over processes, before ZeRO takes them: what each keeps, what the rest looks like."""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from hybrid_rlhf.engine.train import deepspeed_compat
from hybrid_rlhf.models import load, weight_parts
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.transformers_compat import each_as_read
from tests.factories.tiny import save_tiny, tiny_causal_lm

CPU = torch.device("cpu")


@pytest.fixture
def processes(monkeypatch):
    def are(count: int, this: int) -> None:
        monkeypatch.setattr(weight_parts, "world_size", lambda: count)
        monkeypatch.setattr(load, "world_size", lambda: count)
        monkeypatch.setattr(weight_parts, "rank", lambda: this)

    return are


@pytest.mark.parametrize(("this", "kept"), [(0, [0, 1, 2]), (1, [3, 4, 5]), (2, [6, 7, 8]), (3, [9, 0, 0])])
def test_each_process_keeps_its_piece_of_the_flat_weight_and_the_last_one_ends_with_zeros(processes, this, kept):
    processes(4, this)
    weight = nn.Parameter(torch.arange(10.0).view(2, 5))
    weight_parts.cut(weight, CPU)
    assert weight_parts.part_of(weight).tolist() == kept
    assert weight.shape == (2, 5) and weight.isnan().all()  # whoever computes with it sees that
    assert weight.untyped_storage().nbytes() == 4
    assert weight_parts.take_part(weight).tolist() == kept and weight_parts.part_of(weight) is None


def test_a_model_read_in_parts_keeps_tables_and_norms_whole_and_reads_one_weight_after_the_other(
        processes, tmp_path, monkeypatch):
    save_tiny(tmp_path / "base")
    processes(2, 1)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "0")
    model = load.load_causal_lm(ModelConfig(str(tmp_path / "base"), dtype="float32"), in_parts=True)
    whole = tiny_causal_lm(0)
    for (name, found), wanted in zip(model.named_parameters(), whole.parameters(), strict=True):
        is_layer_s = "layers" in name and wanted.dim() > 1
        assert (weight_parts.part_of(found) is not None) == is_layer_s, name
        part = wanted.flatten()[wanted.numel() // 2:]
        assert torch.equal(weight_parts.part_of(found), part) if is_layer_s else torch.equal(found, wanted), name
    assert os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == "0"


def test_one_process_has_nothing_to_share(processes, tmp_path):
    save_tiny(tmp_path / "base")
    processes(1, 0)
    model = load.load_causal_lm(ModelConfig(str(tmp_path / "base"), dtype="float32"), in_parts=True)
    assert not weight_parts.is_cut(model)


def test_what_is_called_after_each_weight_finds_none_of_the_later_ones_read(tmp_path):
    save_tiny(tmp_path / "base")
    waiting = []

    def look(model: nn.Module, name: str) -> None:
        waiting.append(sum(p.is_meta for p in model.parameters()))

    with each_as_read(look):
        model = load.load_causal_lm(ModelConfig(str(tmp_path / "base"), dtype="float32"))
    count = len(list(model.parameters()))
    assert waiting == list(range(count - 1, -1, -1))


def test_layer_by_layer_only_the_layer_that_computes_is_whole_beside_what_is_no_layer():
    model, now, most = tiny_causal_lm(0), set(), []
    names = {id(p): n for n, p in model.named_parameters()}

    @contextmanager
    def gather(weights):
        own = {names[id(p)] for p in weights}
        assert not own & now
        now.update(own)
        most.append(set(now))
        yield
        now.difference_update(own)

    ids = torch.arange(4, 12)[None]
    expected = model(input_ids=ids).logits
    with weight_parts.layer_by_layer(model, gather):
        assert torch.equal(model(input_ids=ids).logits, expected)
    outside = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    layers = [{n for n in names.values() if f"layers.{i}." in n} for i in range(2)]
    assert most == [outside, outside | layers[0], outside | layers[1]] and not now
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_layer_that_fails_is_let_go_too():
    model, now = tiny_causal_lm(0), []

    class Gathered:  # a generator would end by itself when it is thrown away
        def __enter__(self):
            now.append(self)

        def __exit__(self, *_exc):
            now.remove(self)

    model.model.layers[1].mlp.forward = lambda _x: 1 / 0
    with pytest.raises(ZeroDivisionError), weight_parts.layer_by_layer(model, lambda _w: Gathered()):
        model(input_ids=torch.arange(4)[None])
    assert not now


def test_parts_that_zero_does_not_take_are_an_error(processes):
    processes(2, 0)
    model = tiny_causal_lm(0)
    weight_parts.cut(model.model.layers[0].mlp.up_proj.weight, CPU)
    with pytest.raises(RuntimeError, match="left weights in parts"), deepspeed_compat.taking_parts(model):
        pass
