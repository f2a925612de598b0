"""The types that are said to decode natively are those of the sweep, and a model of one that does not is told of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.engine.decode import runner
from hybrid_rlhf.engine.decode.native_types import NATIVE_TYPES
from hybrid_rlhf.models import hf_attention
from tests.factories.tiny import tiny_causal_lm

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


def test_a_native_model_has_nothing_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = HybridEngine(model := tiny_causal_lm(), model)
    with engine.inference():
        pass
    assert engine.describe()["path"] == "native" and engine.describe()["not_native"] is None
