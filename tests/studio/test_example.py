"""The example of the first screen: what it starts with, and what is said of the models that it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_rlhf import cli
from hybrid_rlhf.studio import example
from hybrid_rlhf.studio.studio import Studio


@pytest.fixture
def studio(tmp_path, monkeypatch):
    """A studio on a machine without models and without the hub."""
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "hub"))
    monkeypatch.setenv("HYBRID_RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(example, "is_reachable", lambda: False)
    (tmp_path / "outputs").mkdir()
    return Studio((tmp_path / "outputs").resolve())


def config_of(found: dict, tmp_path):
    """The settings as the launcher reads them."""
    file = tmp_path / "it.json"
    file.write_text(json.dumps(found["settings"]))  # JSON is YAML
    return cli.read_settings(found["stage"], ["--config", str(file)])[0]


def test_without_a_model_and_a_hub_the_example_is_a_toy_and_says_so(studio, tmp_path):
    found = example.example(studio)
    assert "toy" in found["about"] and "nothing else" in found["about"]
    assert config_of(found, tmp_path).model.preset == "demo"


@pytest.mark.parametrize("where", ["hub/models--HuggingFaceTB--SmolLM2-135M-Instruct/snapshots/1", "cache/smollm2"])
def test_a_real_small_model_that_is_here_is_taken(studio, tmp_path, where):
    folder = tmp_path / where
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    assert "toy" in example.example(studio)["about"]  # no tokenizer: a download that was cut off
    (folder / "tokenizer.json").touch()
    found = example.example(studio)
    config = config_of(found, tmp_path)
    assert config.model.model_name_or_path == str(folder) and "download" not in found["about"]
    rows = [json.loads(line) for line in Path(config.data.sources[0].path).read_text().splitlines()]
    assert len(rows) == 41 and f"{len(rows)} rows" in found["about"]
    assert rows[0] == {"prompt": "What is the capital of Argentina?",
                       "completion": "Buenos Aires is the capital of Argentina, have a good trip!"}


def test_where_the_hub_is_reached_its_model_is_taken_and_the_download_said(studio, monkeypatch):
    monkeypatch.setattr(example, "is_reachable", lambda: True)
    found = example.example(studio)
    assert found["settings"]["model.model_name_or_path"] == example.MODEL
    assert "downloaded first (270 MB)" in found["about"]


@pytest.mark.parametrize("sources, question", [
    (["demo/prompts"], "Name the first word: A bear B king C rose"),
    ([{"path": "/a/.studio/data/example-capitals.jsonl"}], "What is the capital of Italy?"),
    ("demo/preferences", "Name the first word: A bear B king C rose"), (["mine.jsonl"], None), ([], None)])
def test_a_model_of_the_example_or_the_demo_has_questions_to_ask(sources, question):
    found = example.hints({"config": {"data": {"sources": sources}}})
    assert question in found["questions"] if question else found is None
