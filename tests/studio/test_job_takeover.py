"""Studios come and go, jobs stay: a studio that is killed, two on one folder, a watcher that is killed."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack

import pytest

from hybrid_rlhf.core.own_files import is_locked
from hybrid_rlhf.studio import job as job_module
from tests.factories.studio_jobs import (
    StudioProcess,
    ended,
    look,
    notes,
    process_of,
    queue_client,
    start,
    until,
    use_quick_launcher,
)


@pytest.fixture
def script(monkeypatch, tmp_path):
    return use_quick_launcher(monkeypatch, tmp_path)


def states(client) -> dict:
    return {job["run"]: job["state"] for job in client.get("/api/jobs").json()["jobs"]}


def test_a_killed_studio_leaves_its_jobs_to_the_next(script, outputs, tmp_path):
    file = str(tmp_path / "notes")
    first = StudioProcess(script, outputs)
    try:
        running = start(first.client, "a", gate=str(tmp_path / "gate"), rc=7, say="no luck", notes=file)
        waiting = start(first.client, "b", notes=file)
        until(lambda: notes(tmp_path / "notes"))
        assert states(first.client) == {"a": "running", "b": "queued"}
    finally:
        first.end(signal.SIGKILL)
    second = StudioProcess(script, outputs)
    try:
        assert states(second.client) == {"a": "running", "b": "queued"}
        (tmp_path / "gate").touch()
        job = ended(second.client, running["id"])  # whose parent is not this studio's child
        assert (job["state"], job["rc"], job["error"]) == ("failed", 7, "no luck")
        assert ended(second.client, waiting["id"])["state"] == "done"
    finally:
        assert second.end() == 0
    assert [row["what"] for row in notes(tmp_path / "notes")] == ["begin", "end"] * 2


def test_what_ends_while_no_studio_is_there_is_known_later(script, outputs, tmp_path):
    with queue_client(outputs) as client:
        job = start(client, "a", seconds=0.5, rc=3, notes=str(tmp_path / "notes"))
        waiting = start(client, "b")
        until(lambda: notes(tmp_path / "notes"))
    until(lambda: (outputs / ".studio/jobs" / job["id"] / "end.json").exists())
    with queue_client(outputs, is_open=False) as client:
        assert (look(client, job["id"])["state"], look(client, job["id"])["rc"]) == ("failed", 3)
        assert look(client, waiting["id"])["state"] == "queued"  # nobody ran the queue meanwhile


def test_of_two_studios_on_one_folder_one_runs_the_queue_and_then_the_other(script, outputs, tmp_path):
    file = str(tmp_path / "notes")
    with ExitStack() as stack:
        studios = [stack.enter_context(queue_client(outputs)) for _ in range(2)]
        made = [start(studios[i % 2], f"r{i}", seconds=0.1, notes=file) for i in range(4)]
        assert [job["id"] for job in made] == [f"{i:06d}" for i in range(1, 5)]
        for client in studios:
            for job in made:
                assert ended(client, job["id"])["state"] == "done"
        assert [row["what"] for row in notes(tmp_path / "notes")] == ["begin", "end"] * 4
        body = {"kind": "train", "stage": "sft", "run": "long", "settings": {"seconds": 60}}
        assert studios[0].post("/api/jobs", json=body).status_code == 200
        assert studios[1].post("/api/jobs", json=body).status_code == 409
        job = until(lambda: studios[1].get("/api/jobs").json()["jobs"][0])
        until(lambda: look(studios[1], job["id"])["state"] == "running")
        assert studios[1].post("/api/job/stop", json={"id": job["id"]}).status_code == 200
        assert ended(studios[0], job["id"])["state"] == "stopped"


def test_the_lock_of_the_queue_passes_to_the_studio_that_is_left(script, outputs):
    with queue_client(outputs) as left:
        with queue_client(outputs):
            until(lambda: is_locked(outputs / ".studio/jobs/queue.lock"))
        assert ended(left, start(left, "a")["id"])["state"] == "done"


def test_a_run_whose_watcher_is_killed_still_counts_and_still_stops(script, outputs, tmp_path):
    with queue_client(outputs) as client:
        job = start(client, "a", seconds=60, notes=str(tmp_path / "notes"))
        waiting = start(client, "b")
        found = process_of(outputs, job["id"])
        until(lambda: notes(tmp_path / "notes"))
        os.kill(found["watcher"]["pid"], signal.SIGKILL)
        until(lambda: not is_locked(outputs / ".studio/jobs" / job["id"] / "lock"))
        assert look(client, job["id"])["state"] == "running" and look(client, waiting["id"])["state"] == "queued"
        client.post("/api/job/stop", json={"id": job["id"]})
        job = ended(client, job["id"])
        assert (job["state"], job["rc"]) == ("lost", None) and "not known" in job["error"]
        assert [row["what"] for row in notes(tmp_path / "notes")] == ["begin", "signal", "end"]
        assert ended(client, waiting["id"])["state"] == "done"


def test_a_job_whose_watcher_is_killed_is_not_started_twice(script, outputs, tmp_path):
    """Even where the watcher could not note its process, as on a full disk."""
    with queue_client(outputs) as client:
        job = start(client, "a", seconds=60, notes=str(tmp_path / "notes"))
        found = process_of(outputs, job["id"])
        until(lambda: notes(tmp_path / "notes"))
        (outputs / ".studio/jobs" / job["id"] / "process.json").write_text(json.dumps({**found, "process": None}))
        os.kill(found["watcher"]["pid"], signal.SIGKILL)
        assert ended(client, job["id"])["state"] == "lost"
        assert ended(client, start(client, "b")["id"])["state"] == "done"  # the queue went on, without a second "a"
        assert look(client, job["id"])["state"] == "lost" and len(notes(tmp_path / "notes")) == 1
        os.kill(found["process"]["pid"], signal.SIGKILL)


def test_a_number_that_has_become_a_strangers_is_neither_alive_nor_killed(script, outputs, tmp_path, monkeypatch):
    """The watcher and its process were killed, and their numbers now belong to a process that began at another time."""
    with queue_client(outputs) as client:
        job = start(client, "a", seconds=60, notes=str(tmp_path / "notes"))
        found = process_of(outputs, job["id"])
        until(lambda: notes(tmp_path / "notes"))
        other = start(client, "b", seconds=60)
        for name in ("watcher", "process"):
            os.kill(found[name]["pid"], signal.SIGKILL)
        stranger = process_of(outputs, other["id"])["process"]["pid"]
        assert look(client, job["id"])["state"] == "lost"
        path = outputs / ".studio/jobs" / job["id"] / "process.json"
        for name in ("watcher", "process"):
            found[name] = {"pid": stranger, "began": found[name]["began"] - 60}
        path.write_text(json.dumps(found))
    with queue_client(outputs, is_open=False) as client:
        assert look(client, job["id"])["state"] == "lost"
        assert client.post("/api/job/stop", json={"id": job["id"]}).status_code == 409
        monkeypatch.setattr(job_module, "DOUBLE_CLICK_SECONDS", 0)
        assert look(client, other["id"])["state"] == "running"
        client.post("/api/job/stop", json={"id": other["id"]})
        assert ended(client, other["id"])["state"] == "stopped"
