"""Offline methods learn on the embedded task: on held-out pairs the policy comes to prefer what was chosen."""

from __future__ import annotations

import json

import pytest
from tiny import own_cache

from hybrid_rlhf.cli import main

pytestmark = pytest.mark.slow
DATA = ["--data.split=[4,3,3]", "--data.eval_fraction", "0.08", "--data.max_length", "64", "--data.max_samples", "6000",
        "--model.dtype", "float32", "--train.per_device_eval_batch_size", "256", "--train.max_eval_batches", "1"]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A policy that has seen some demonstrations, many of them wrong."""
    folder = tmp_path_factory.mktemp("learns")
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        assert main(["--stage", "sft", "--output_dir", f"{folder}/sft", "--model.preset", "demo", "--model.vocab_size",
                     "512", "--data.sources=[{path: demo/demonstrations}]", *DATA, "--train.learning_rate", "4e-3",
                     "--train.max_steps", "120", "--train.per_device_train_batch_size", "64"]) == 0
        yield folder


@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_held_out_preferences_are_learned(start, stage) -> None:
    assert main(["--stage", stage, "--output_dir", f"{start}/{stage}", "--data.sources=[{path: demo/preferences}]",
                 *DATA, "--train.learning_rate", "1e-3", "--train.max_steps", "40", "--train.eval_steps", "1",
                 "--train.per_device_train_batch_size", "32"]) == 0
    rows = map(json.loads, (start / stage / "metrics.jsonl").read_text().splitlines())
    held_out = [row for row in rows if "eval/loss" in row]
    first, last = held_out[0], held_out[-1]
    assert last["eval/rewards/margins"] > first["eval/rewards/margins"] + 0.1  # beta 0.1: a nat
    assert last["eval/loss"] < first["eval/loss"]
    if stage != "kto":  # unpaired rows have no accuracy
        assert last["eval/rewards/accuracies"] > 0.65
