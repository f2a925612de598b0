"""How far logits over slots may be off: what rounding does to this very model, and never what a fault does."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.engine.decode import runner
from hybrid_rlhf.engine.decode.native_types import NATIVE_TYPES
from hybrid_rlhf.engine.decode.parity import PROBE_LENGTHS, PROBE_STEPS, probe_bound, probe_sequences
from hybrid_rlhf.engine.decode.runner import Runner
from hybrid_rlhf.models import hf_attention
from tests.factories.tiny import tiny_causal_lm

LARGER = dict(hidden_size=256, num_hidden_layers=12, intermediate_size=512)


class Noisy(nn.Module):
    """Logits 0 and 1, of which a row in a batch has `noise` more than a row alone: over their spread of 0.5, twice."""

    def __init__(self, noise: float, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embeddings, self.head = nn.Embedding(2, 1, dtype=dtype), nn.Linear(1, 2, dtype=dtype)
        self.get_input_embeddings, self.get_output_embeddings = lambda: self.embeddings, lambda: self.head
        self.noise = noise
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=2, model_type="noisy"))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        logits = torch.tensor([0.0, 1.0]).expand(*input_ids.shape, 2)
        return SimpleNamespace(logits=logits + self.noise * (len(input_ids) > 1))


@pytest.mark.parametrize(("noise", "dtype", "bound"), [
    (0.0, torch.bfloat16, 0.05), (0.005, torch.bfloat16, 0.05), (0.01, torch.bfloat16, 0.08),
    (0.5, torch.bfloat16, 0.2), (0.0, torch.float32, 1e-4), (0.5, torch.float32, 4e-4)])
def test_the_bound_is_four_times_what_a_batch_changes_between_a_least_and_a_largest(noise, dtype, bound):
    assert probe_bound(Noisy(noise, dtype)) == pytest.approx(bound, rel=1e-4)


def test_it_is_measured_once_for_a_model():
    model = Noisy(0.01)
    first = probe_bound(model)
    model.noise = 0.5
    assert probe_bound(model) == first


def without_first_column(model: nn.Module) -> torch.Tensor:
    """A wrong mask: no token but the first sees the first."""
    rows = []
    for ids, length in zip(probe_sequences(model), PROBE_LENGTHS, strict=True):
        seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        seen[1:, 0] = False
        logits = model(input_ids=torch.tensor([ids]), attention_mask=seen[None, None], use_cache=False).logits[0]
        rows.append(logits.float()[length - 1 : length - 1 + PROBE_STEPS])
    return torch.stack(rows)


def with_a_position_dropped(model: nn.Module) -> torch.Tensor:
    """A column that was lost: the token is not there, the others keep their positions."""
    rows = []
    for ids, length in zip(probe_sequences(model), PROBE_LENGTHS, strict=True):
        kept = [i for i in range(len(ids)) if i != 3 or length < 5]
        logits = model(input_ids=torch.tensor([ids])[:, kept], position_ids=torch.tensor([kept]), use_cache=False,
                       attention_mask=torch.ones(1, len(kept), dtype=torch.long)).logits[0]
        rows.append(logits.float()[-PROBE_STEPS - 1 : -1])
    return torch.stack(rows)


@pytest.mark.parametrize("fault", [without_first_column, with_a_position_dropped])
@pytest.mark.parametrize("changes", [{}, LARGER, {"kind": "gemma2", "head_dim": 8}])
@torch.no_grad()
def test_in_bfloat16_the_right_logits_pass_and_a_fault_is_refused_in_small_and_larger_models(fault, changes):
    model = tiny_causal_lm(**changes).bfloat16()
    runner = Runner(model, None)
    runner.probe()
    assert runner.path == "native" and not runner.reasons
    assert runner.disagreement(fault(model), "with a fault") is not None


# -- the types that are said to decode natively are those of the sweep, and a model of one that does not is told of ---


RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results" / "architectures.json"


def test_the_native_types_are_those_of_the_architectures_page() -> None:
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert {row["type"] for row in rows if row["path"] == "native" and ":" not in row["type"]} == NATIVE_TYPES


def test_a_release_that_renames_the_cache_again_is_told_as_a_fall_from_native(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hf_attention, runner):  # a forward without any name that is known
        monkeypatch.setattr(module, "cache_name", lambda _module: None)
    engine = HybridEngine(model := tiny_causal_lm(), model)
    with engine.inference():
        pass
    ways = engine.describe()
    assert ways["path"] == "generate" and ways["not_native"] == ways["refused"]["native"]
