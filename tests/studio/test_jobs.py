"""The queue: one job at a time and in order, stopped as asked, judged by what it leaves; and the real launcher."""

from __future__ import annotations

import errno
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from hybrid_rlhf.studio import job as job_module
from hybrid_rlhf.studio import jobs
from tests.factories.studio_jobs import (
    ended,
    look,
    notes,
    queue_client,
    start,
    stop_all,
    until,
    use_quick_launcher,
)
from tests.factories.tiny import own_cache, save_tiny


@pytest.fixture
def script(monkeypatch, tmp_path):
    return use_quick_launcher(monkeypatch, tmp_path)


@pytest.fixture
def client(script, outputs):
    with queue_client(outputs) as found:
        yield found


def test_a_job_is_a_process_of_its_own_session_without_a_terminal(client, outputs, tmp_path):
    job = start(client, "demo/one", notes=str(tmp_path / "notes"), say="hello")
    assert (job["kind"], job["stage"], job["run"], job["title"]) == ("train", "sft", "demo/one", "sft: demo/one")
    job = ended(client, job["id"])
    assert (job["state"], job["rc"], job["error"], job["place"]) == ("done", 0, None, None)
    assert job["created"] <= job["started"] <= job["finished"]
    begun = notes(tmp_path / "notes")[0]
    assert begun["session"] == begun["group"] == begun["pid"] and begun["session"] != os.getsid(0)
    assert begun["stdin"] == "/dev/null" and begun["cwd"] == os.getcwd() and begun["hangup"] == "0"  # SIG_DFL
    assert begun["run"] == str(outputs / "demo/one")
    assert begun["words"] == ["sft", "--config", str(outputs / ".studio/jobs" / job["id"] / "settings.yaml")]
    assert client.get("/api/job", params={"id": job["id"]}).json()["output"] == "hello\n"


def test_starts_at_once_are_jobs_that_run_one_at_a_time_in_order(client, tmp_path):
    file = str(tmp_path / "notes")
    with ThreadPoolExecutor(5) as pool:
        made = list(pool.map(lambda i: start(client, f"r{i}", notes=file, seconds=0.05), range(5)))
    ids = sorted(job["id"] for job in made)
    assert ids == [f"{i:06d}" for i in range(1, 6)]
    for number in ids:
        assert ended(client, number)["state"] == "done"
    runs = {job["id"]: job["run"] for job in made}
    expected = [(what, runs[number]) for number in ids for what in ("begin", "end")]
    assert [(row["what"], Path(row["run"]).name) for row in notes(tmp_path / "notes")] == expected


def test_of_two_starts_of_one_run_at_once_one_is_refused(client):
    body = {"kind": "train", "stage": "sft", "run": "a", "settings": {"seconds": 60}}
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: client.post("/api/jobs", json=body), range(2)))
    assert sorted(each.status_code for each in answers) == [200, 409]
    for run in ("a", "a/b"):  # inside of a run that waits
        assert client.post("/api/jobs", json={**body, "run": run}).status_code == 409
    stop_all(client)


def test_places_count_what_waits(client):
    first, *rest = [start(client, f"r{i}", seconds=60) for i in range(3)]
    until(lambda: look(client, first["id"])["state"] == "running")
    listed = client.get("/api/jobs").json()["jobs"]
    assert [(job["id"], job["state"], job["place"]) for job in listed] == [
        (rest[1]["id"], "queued", 2), (rest[0]["id"], "queued", 1), (first["id"], "running", None)]
    for job in reversed(listed):
        client.post("/api/job/stop", json={"id": job["id"]})
    assert ended(client, first["id"])["state"] == "stopped"


def test_a_job_that_waits_is_dropped(client, tmp_path):
    first = start(client, "a", gate=str(tmp_path / "gate"))
    second = start(client, "b", notes=str(tmp_path / "notes"))
    answer = client.post("/api/job/stop", json={"id": second["id"]}).json()
    assert (answer["state"], answer["rc"], answer["started"]) == ("stopped", None, None)
    third = start(client, "b", seconds=0)  # its name is free again
    (tmp_path / "gate").touch()
    assert ended(client, third["id"])["state"] == "done" and ended(client, first["id"])["state"] == "done"
    assert notes(tmp_path / "notes") == []
    assert client.post("/api/job/stop", json={"id": second["id"]}).status_code == 409


def test_one_stop_is_one_sigterm_and_a_second_in_a_hurry_is_none(client, tmp_path, monkeypatch):
    job = start(client, "a", seconds=60, ignores=1, notes=str(tmp_path / "notes"))
    until(lambda: notes(tmp_path / "notes"))
    monkeypatch.setattr(job_module, "DOUBLE_CLICK_SECONDS", 600)
    for _ in range(3):  # who clicks twice
        assert client.post("/api/job/stop", json={"id": job["id"]}).json()["state"] == "running"
    until(lambda: len(notes(tmp_path / "notes")) == 2)
    with pytest.raises(AssertionError):
        until(lambda: len(notes(tmp_path / "notes")) > 2, 1)
    client.post("/api/run/stop", json={"id": "a"})  # no folder: the launcher has made none
    assert look(client, job["id"])["state"] == "running"
    jobs_folder = tmp_path / "outputs/.studio/jobs" / job["id"]
    os.utime(jobs_folder / "stop", (1, 1))  # long ago
    client.post("/api/job/stop", json={"id": job["id"]})
    job = ended(client, job["id"])
    assert (job["state"], job["rc"], job["error"]) == ("stopped", 130, None)
    assert [row["what"] for row in notes(tmp_path / "notes")] == ["begin", "signal", "signal", "end"]


@pytest.mark.slow  # for the ten seconds of grace
def test_what_ends_at_no_signal_is_killed(client, tmp_path, monkeypatch):
    job = start(client, "a", seconds=60, ignores=9, notes=str(tmp_path / "notes"))
    until(lambda: notes(tmp_path / "notes"))
    monkeypatch.setattr(job_module, "DOUBLE_CLICK_SECONDS", 0)
    for _ in range(2):
        client.post("/api/job/stop", json={"id": job["id"]})
    job = ended(client, job["id"])
    assert (job["state"], job["rc"]) == ("stopped", -signal.SIGKILL)


def test_stopping_a_run_finds_its_job_and_no_stranger(client, outputs, tmp_path):
    (outputs / "a").mkdir()
    assert client.post("/api/run/stop", json={"id": "a"}).json()["error"] == "a is not running"
    (outputs / "a").rmdir()
    job = start(client, "a", seconds=60, notes=str(tmp_path / "notes"))
    until(lambda: notes(tmp_path / "notes"))
    (outputs / "a").mkdir()
    assert client.post("/api/run/stop", json={"id": "a"}).json()["id"] == job["id"]
    assert ended(client, job["id"])["state"] == "stopped"
    assert client.post("/api/run/stop", json={"id": "b"}).status_code == 404


@pytest.mark.parametrize("settings, rc, error", [
    ({"say": "one\nerror: data.sources is empty; give one\n\n", "rc": 2}, 2, "error: data.sources is empty; give one"),
    ({"say": "Traceback\nKeyError: 'x\x1b[2J'", "rc": 1}, 1, "KeyError: 'x␛[2J'"),
    ({"rc": 3}, 3, "it ended with exit code 3 and said nothing")])
def test_the_error_of_a_job_is_the_last_line_that_it_said(client, settings, rc, error):
    job = ended(client, start(client, "a", **settings)["id"])
    assert (job["state"], job["rc"], job["error"]) == ("failed", rc, error)


def test_a_process_that_someone_kills_has_failed(client, tmp_path):
    job = start(client, "a", seconds=60, notes=str(tmp_path / "notes"))
    until(lambda: notes(tmp_path / "notes"))
    os.kill(notes(tmp_path / "notes")[0]["pid"], signal.SIGKILL)
    job = ended(client, job["id"])
    assert (job["state"], job["rc"]) == ("failed", -9)
    assert job["error"] == "its process was ended by SIGKILL; the system does that where memory runs out"


def test_a_full_disk_is_one_line_and_leaves_no_half_of_a_job(client, outputs, monkeypatch):
    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    start(client, "first")
    until(lambda: client.get("/api/jobs").json()["jobs"][0]["state"] == "done")
    monkeypatch.setattr("hybrid_rlhf.core.own_files.os.fsync", full)
    answer = client.post("/api/jobs", json={"kind": "train", "stage": "sft", "run": "a", "settings": {}})
    assert answer.status_code == 507
    assert answer.json()["error"].endswith("No space left on device; make room")
    monkeypatch.undo()
    assert {path.name for path in (outputs / ".studio/jobs").iterdir()} == {"000001", "changes.lock", "queue.lock"}


def test_what_cannot_be_started_waits_and_says_why(client, monkeypatch):
    def full(_path: Path, _text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jobs, "RETRY_SECONDS", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(job_module, "write_file", full)
        job = start(client, "a")
        until(lambda: look(client, job["id"])["error"])
        job = look(client, job["id"])
        assert job["state"] == "queued" and "No space left on device" in job["error"]
    job = ended(client, job["id"])
    assert (job["state"], job["error"]) == ("done", None)


STRANGE = "it's \"a\"\n#1: {x} !!python/object/apply:os.system ['touch hit'] \u2028 é"
SETTINGS = {"train.max_steps": 60, "train.per_device_train_batch_size": 2, "train.save_steps": 0,
            "train.num_fixed_prompts": 0, "data.eval_fraction": 0.0}


@pytest.fixture
def launching(tmp_path, monkeypatch):
    """A client of the queue with the real launcher."""
    own_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(jobs, "LOOK_SECONDS", 0.05)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    with queue_client(tmp_path / "outputs") as found:
        yield found
        stop_all(found)


@pytest.fixture
def tiny(tmp_path) -> dict:
    """Settings of a run on rows of a strange file with a tiny model."""
    rows = [{"prompt": f"What is {i} and {i + 1}?", "completion": f"It is {2 * i + 1}."} for i in range(24)]
    data = tmp_path / f"{STRANGE.replace('/', '-')}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {**SETTINGS, "data.sources": [str(data)], "model.model_name_or_path": save_tiny(tmp_path / "tiny")}


def done(launching, number: str) -> None:
    state = ended(launching, number, 240)["state"]
    assert state == "done", launching.get("/api/job", params={"id": number}).text


def rows_of(run: Path) -> list[dict]:
    """metrics.jsonl without what depends on the moment."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in found]


@pytest.mark.slow
def test_settings_that_the_launcher_refuses_are_one_line_of_the_job(launching, tmp_path):
    settings = {"data.sources": STRANGE, "model.preset": "tiny"}
    job = ended(launching, start(launching, "a", **settings)["id"], 120)
    assert (job["state"], job["rc"]) == ("failed", 2)
    assert job["error"].startswith("error: ") and "it's" in job["error"] and "\n" not in job["error"]
    assert not (tmp_path / "hit").exists() and not (tmp_path / "outputs/a/model").exists()


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_exactly_also_if_it_began_with_resume_never(launching, tmp_path, tiny):
    outputs = tmp_path / "outputs"
    whole = start(launching, "demo/whole", **tiny)
    done(launching, whole["id"])
    assert json.loads((outputs / "demo/whole/run.json").read_text())["config"]["data"]["sources"][0][
        "path"] == tiny["data.sources"][0]
    job = start(launching, "demo/cut", **tiny, resume="never")
    until(lambda: (outputs / "demo/cut/metrics.jsonl").exists() and rows_of(outputs / "demo/cut"), 240)
    launching.post("/api/run/stop", json={"id": "demo/cut"})
    job = ended(launching, job["id"], 120)
    assert (job["state"], job["rc"], job["error"]) == ("stopped", 130, None)
    assert 1 <= len(rows_of(outputs / "demo/cut")) < 60
    assert "stopped after step" in launching.get("/api/job", params={"id": job["id"]}).json()["output"]
    refused = launching.post("/api/jobs", json={"kind": "train", "stage": "sft", "run": "demo/cut", "settings": tiny})
    assert refused.status_code == 409

    resumed = launching.post("/api/run/resume", json={"id": "demo/cut"}).json()
    assert (resumed["title"], resumed["run"]) == ("sft: demo/cut, resumed", "demo/cut")
    assert launching.post("/api/run/resume", json={"id": "demo/cut"}).status_code == 409  # it waits already
    done(launching, resumed["id"])
    assert rows_of(outputs / "demo/cut") == rows_of(outputs / "demo/whole")
    mine, theirs = (load_file(outputs / "demo" / name / "model/model.safetensors") for name in ("cut", "whole"))
    assert mine.keys() == theirs.keys() and all((mine[name] == theirs[name]).all() for name in mine)
    assert launching.post("/api/run/resume", json={"id": "demo/cut"}).json()["error"] == "demo/cut is finished"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_evaluation_takes_prompts_and_rewards_from_its_runs_after_a_signal_check(launching, tmp_path, tiny):
    """The evaluation is given two runs and nothing else: the second was trained on rewards."""
    outputs = tmp_path / "outputs"
    data = {**{name: tiny[name] for name in ("data.sources", "model.model_name_or_path", "data.eval_fraction")},
            "data.max_prompt_length": 64, "ppo.sampling.max_new_tokens": 8,
            "reward.functions": "builtin:length_penalty",
            "reward.options": {"length_penalty": {"max_tokens": 8, "buffer": 4}}}
    check = launching.post("/api/jobs", json={"kind": "signal", "stage": "grpo", "run": "b", "settings": data}).json()
    first = start(launching, "a", **{**tiny, "train.max_steps": 1})
    second = start(launching, "b", stage="grpo", **data, **{
        "train.max_steps": 1, "train.per_device_train_batch_size": 2, "ppo.sampling.num_samples": 2})
    done(launching, check["id"])
    output = launching.get("/api/job", params={"id": check["id"]}).json()["output"]
    assert "verdict: " in output and "a training step" in output
    for job in (first, second):
        done(launching, job["id"])
    made = launching.post("/api/jobs", json={"kind": "evaluate", "runs": ["a", "b"]}).json()
    assert (made["run"], made["title"]) == ("evaluate/1", "evaluation of a, b")
    done(launching, made["id"])
    found = json.loads((outputs / "evaluate/1/evaluate.json").read_text())
    assert [row["model"] for row in found["models"]] == ["a", "b"]
