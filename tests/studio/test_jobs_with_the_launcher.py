"""The queue with the real launcher: settings of whatever text, a run that is stopped and goes on, an export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file

from hybrid_rlhf.studio import jobs
from tests.factories.studio_jobs import ended, look, queue_client, start, until
from tests.factories.tiny import own_cache, save_tiny

STRANGE = "it's \"a\"\n#1: {x} !!python/object/apply:os.system ['touch hit'] \u2028 é"
SETTINGS = {"train.max_steps": 60, "train.per_device_train_batch_size": 2, "train.save_steps": 0,
            "train.num_fixed_prompts": 0, "data.eval_fraction": 0.0}


@pytest.fixture
def client(tmp_path, monkeypatch):
    own_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(jobs, "LOOK_SECONDS", 0.05)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    with queue_client(tmp_path / "outputs") as found:
        yield found


@pytest.fixture
def tiny(tmp_path) -> dict:
    """Settings of a run on rows of a strange file with a tiny model."""
    rows = [{"prompt": f"What is {i} and {i + 1}?", "completion": f"It is {2 * i + 1}."} for i in range(24)]
    data = tmp_path / f"{STRANGE.replace('/', '-')}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {**SETTINGS, "data.sources": [str(data)], "model.model_name_or_path": save_tiny(tmp_path / "tiny")}


def rows_of(run: Path) -> list[dict]:
    """metrics.jsonl without what depends on the moment."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in found]


@pytest.mark.slow
@pytest.mark.parametrize("settings, named", [
    ({"data.sources": STRANGE, "model.preset": "tiny"}, "it's"),
    ({"train.no_such": 1}, "train.no_such"),
    ({"model": {"class_path": "os.system", "init_args": {"command": "touch hit"}}}, "class_path"),
    ({"config": "/etc/passwd"}, "config"),
    ({"model.preset": "tiny", "data.sources": "!!python/object/apply:os.system ['touch hit']"}, "data.sources")])
def test_settings_that_the_launcher_refuses_are_one_line_of_the_job(client, tmp_path, settings, named):
    job = ended(client, start(client, "a", **settings)["id"], 120)
    assert (job["state"], job["rc"]) == ("failed", 2)
    assert job["error"].startswith("error: ") and named in job["error"] and "\n" not in job["error"]
    assert not (tmp_path / "hit").exists() and not (tmp_path / "outputs/a/model").exists()


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_exactly_and_is_exported(client, tmp_path, tiny):
    outputs = tmp_path / "outputs"
    whole = start(client, "demo/whole", **tiny)
    assert ended(client, whole["id"], 240)["state"] == "done"
    assert json.loads((outputs / "demo/whole/run.json").read_text())["config"]["data"]["sources"][0][
        "path"] == tiny["data.sources"][0]
    job = start(client, "demo/cut", **tiny)
    until(lambda: (outputs / "demo/cut/metrics.jsonl").exists() and rows_of(outputs / "demo/cut"), 240)
    client.post("/api/run/stop", json={"id": "demo/cut"})
    job = ended(client, job["id"], 120)
    assert (job["state"], job["rc"], job["error"]) == ("stopped", 130, None)
    assert 1 <= len(rows_of(outputs / "demo/cut")) < 60
    assert "stopped after step" in client.get("/api/job", params={"id": job["id"]}).json()["output"]
    refused = client.post("/api/jobs", json={"kind": "train", "stage": "sft", "run": "demo/cut", "settings": tiny})
    assert refused.status_code == 409

    resumed = client.post("/api/run/resume", json={"id": "demo/cut"}).json()
    assert (resumed["title"], resumed["run"]) == ("sft: demo/cut, resumed", "demo/cut")
    assert client.post("/api/run/resume", json={"id": "demo/cut"}).status_code == 409  # it waits already
    assert ended(client, resumed["id"], 240)["state"] == "done"
    assert rows_of(outputs / "demo/cut") == rows_of(outputs / "demo/whole")
    mine, theirs = (load_file(outputs / "demo" / name / "model/model.safetensors") for name in ("cut", "whole"))
    assert mine.keys() == theirs.keys() and all((mine[name] == theirs[name]).all() for name in mine)
    assert client.post("/api/run/resume", json={"id": "demo/cut"}).json()["error"] == "demo/cut is finished"

    answer = client.post("/api/jobs", json={"kind": "export", "run": "demo/cut", "name": "Mine", "gguf": "q8_0",
                                            "ollama": True}).json()
    assert ended(client, answer["id"], 240)["state"] == "done", look(client, answer["id"])
    found, = client.get("/api/exports").json()["exports"]
    assert (found["name"], found["run"], found["folder"]) == ("Mine", "demo/cut", str(outputs / "exports/Mine"))
    assert {"model.safetensors", "config.json", "Modelfile", "Mine-q8_0.gguf"} <= {f["name"] for f in found["files"]}
    assert len(found["checks"]) == 1 and found["checks"][0].startswith("reloaded in a fresh process: tokens equal")
    assert found["card"].startswith("---")


@pytest.mark.slow
def test_a_resumed_run_that_began_with_resume_never_keeps_its_checkpoints(client, tmp_path, tiny):
    folder = tmp_path / "outputs/a"
    job = start(client, "a", **tiny, resume="never")
    until(lambda: (folder / "metrics.jsonl").exists() and len(rows_of(folder)) > 1, 240)
    client.post("/api/job/stop", json={"id": job["id"]})
    assert ended(client, job["id"], 120)["state"] == "stopped"
    assert yaml.safe_load((folder / "config.yaml").read_text())["resume"] == "never"
    again = client.post("/api/run/resume", json={"id": "a"}).json()
    assert ended(client, again["id"], 240)["state"] == "done"
    assert "goes on after step" in client.get("/api/job", params={"id": again["id"]}).json()["output"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_evaluation_takes_prompts_and_rewards_from_its_runs_after_a_signal_check(client, tmp_path, tiny):
    """The evaluation is given two runs and nothing else: the second was trained on rewards."""
    outputs = tmp_path / "outputs"
    data = {**{name: tiny[name] for name in ("data.sources", "model.model_name_or_path", "data.eval_fraction")},
            "data.max_prompt_length": 64, "ppo.sampling.max_new_tokens": 8,
            "reward.functions": "builtin:length_penalty",
            "reward.options": {"length_penalty": {"max_tokens": 8, "buffer": 4}}}
    check = client.post("/api/jobs", json={"kind": "signal", "stage": "grpo", "run": "b", "settings": data}).json()
    first = start(client, "a", **{**tiny, "train.max_steps": 1})
    second = start(client, "b", stage="grpo", **data, **{
        "train.max_steps": 1, "train.per_device_train_batch_size": 2, "ppo.sampling.num_samples": 2})
    assert ended(client, check["id"], 240)["state"] == "done", client.get("/api/job", params={"id": check["id"]}).text
    output = client.get("/api/job", params={"id": check["id"]}).json()["output"]
    assert "verdict: " in output and "a training step" in output
    for job in (first, second):
        assert ended(client, job["id"], 240)["state"] == "done", client.get("/api/job", params={"id": job["id"]}).text
    made = client.post("/api/jobs", json={"kind": "evaluate", "runs": ["a", "b"]}).json()
    assert (made["run"], made["title"]) == ("evaluate/1", "evaluation of a, b")
    job = ended(client, made["id"], 240)
    assert job["state"] == "done", client.get("/api/job", params={"id": made["id"]}).text
    found = json.loads((outputs / "evaluate/1/evaluate.json").read_text())
    assert [row["model"] for row in found["models"]] == ["a", "b"]
