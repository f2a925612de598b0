"""Two processes under ZeRO 3 that read a model in parts, and write it weight by weight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.factories.processes import ended, launch
from tests.factories.tiny import save_tiny, tiny_causal_lm

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(900)]
# sizes whose products do not divide by two
ODD = dict(hidden_size=35, num_attention_heads=5, num_key_value_heads=5, head_dim=8, intermediate_size=63)
EXPERTS = dict(kind="mixtral", num_local_experts=4, num_experts_per_tok=2)
KINDS = ("dense", "tied", "experts", "bfloat16")


def made(place: Path) -> Path:
    save_tiny(place / "dense", **ODD)
    save_tiny(place / "tied", tie_word_embeddings=True)
    save_tiny(place / "experts", **EXPERTS)
    save_tiny(place / "bfloat16")
    tiny_causal_lm().to(torch.bfloat16).save_pretrained(place / "bfloat16", max_shard_size="20KB")
    (place / "bfloat16" / "model.safetensors").unlink()
    return place


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, list[dict]]:
    """What each process found, of both parts: memory first, when they have done nothing else yet."""
    place = tmp_path_factory.mktemp("parts")
    made(place / "equal")
    (place / "peak").mkdir()
    done = ended(launch("tests/distributed/rank_loading.py", str(place / "out.json"), str(place), "peak", "equal"))
    assert (place / "out.json").exists(), done.stderr[-3000:]
    return json.loads((place / "out.json").read_text())


@pytest.fixture
def found(results) -> list[dict]:
    return results["equal"]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_read_in_parts_are_those_that_transformers_reads_bit_for_bit(found, kind):
    assert [(each[kind]["weights"], each[kind]["numel"]) for each in found] == [(0, True)] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_written_weight_by_weight_has_the_tensors_that_were_read_bit_for_bit(found, kind):
    assert [each[kind]["files"] for each in found] == [0, 0]


def test_a_process_holds_half_of_the_layers_and_the_tables_of_words(found):
    """dense: in each of 2 layers 4 matrices of 40 x 35 and 3 of 63 x 35; 5 norms of 35; 2 tables of 300 x 35."""
    layers, small, tables = 2 * 35 * (4 * 40 + 3 * 63), 5 * 35, 2 * 300 * 35
    share = (layers / 2 + small + tables) / (layers + small + tables)
    for each in found:
        assert each["dense"]["share"] == pytest.approx(share, abs=0.001)  # a stand-in is one number


def test_added_words_and_adapters_over_a_model_in_parts_are_those_over_a_whole_one(found):
    assert [(each["adapted"]["weights"], each["adapted"]["files"]) for each in found] == [(0, 0)] * 2
    assert all(each["adapted"]["share"] < 0.8 for each in found)


def test_a_new_scalar_head_over_a_model_in_parts_is_that_over_a_whole_one(found):
    assert [(each["scalar"]["weights"], each["scalar"]["files"]) for each in found] == [(0, 0)] * 2


def test_where_the_main_process_fails_the_others_are_free_again(found):
    assert [each["failing"] for each in found] == [
        {"has_failed": True, "sizes": [300 * 35] * 2, "left": 0}, {"has_failed": False, "sizes": [], "left": 0}]


def test_no_process_ever_has_room_for_the_whole_model(results):
    for each in results["peak"]:
        for name in ("float32, in parts", "bfloat16, in parts"):
            case = each[name]
            assert case["loading"] < 0.65 * case["whole"], (name, case)  # half, tables of words, one weight
            assert case["writing"] < 0.35 * case["whole"], (name, case)  # a file and the weights of a layer
        old = each["bfloat16, whole"]
        assert old["loading"] > 0.9 * old["whole"], old  # what the measure says of a process that has it all
