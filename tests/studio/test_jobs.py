"""The queue: one job at a time and in order, stopped as asked, judged by what its process leaves behind."""

from __future__ import annotations

import errno
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybrid_rlhf.core.own_files import take_lock
from hybrid_rlhf.studio import job as job_module
from hybrid_rlhf.studio import jobs
from hybrid_rlhf.studio.studio import Studio
from tests.factories.studio_jobs import (
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


@pytest.mark.slow
def test_ten_starts_at_once_are_ten_jobs_that_run_one_at_a_time_in_order(client, tmp_path):
    file = str(tmp_path / "notes")
    with ThreadPoolExecutor(10) as pool:
        made = list(pool.map(lambda i: start(client, f"r{i}", notes=file, seconds=0.05), range(10)))
    ids = sorted(job["id"] for job in made)
    assert ids == [f"{i:06d}" for i in range(1, 11)]
    for number in ids:
        assert ended(client, number)["state"] == "done"
    runs = {job["id"]: job["run"] for job in made}
    expected = [(what, runs[number]) for number in ids for what in ("begin", "end")]
    assert [(row["what"], Path(row["run"]).name) for row in notes(tmp_path / "notes")] == expected


def test_of_two_starts_of_one_run_at_once_one_is_refused(client):
    body = {"kind": "train", "stage": "sft", "run": "a", "settings": {"seconds": 1}}
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: client.post("/api/jobs", json=body), range(2)))
    assert sorted(each.status_code for each in answers) == [200, 409]
    for run in ("a", "a/b"):  # inside of a run that waits
        assert client.post("/api/jobs", json={**body, "run": run}).status_code == 409


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
    first = start(client, "a", seconds=0.5)
    second = start(client, "b", notes=str(tmp_path / "notes"))
    answer = client.post("/api/job/stop", json={"id": second["id"]}).json()
    assert (answer["state"], answer["rc"], answer["started"]) == ("stopped", None, None)
    third = start(client, "b", seconds=0)  # its name is free again
    assert ended(client, third["id"])["state"] == "done" and ended(client, first["id"])["state"] == "done"
    assert notes(tmp_path / "notes") == []
    assert client.post("/api/job/stop", json={"id": second["id"]}).status_code == 409


def test_one_stop_is_one_sigterm_and_a_second_in_a_hurry_is_none(client, tmp_path):
    job = start(client, "a", seconds=60, ignores=1, notes=str(tmp_path / "notes"))
    until(lambda: notes(tmp_path / "notes"))
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


def test_a_folder_that_is_gone_is_one_line_of_the_job(client, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    first = start(client, "a", seconds=0.5)
    second = start(client, "b")
    monkeypatch.chdir(tmp_path)
    until(lambda: look(client, first["id"])["state"] == "running")
    (tmp_path / "here").rmdir()
    job = ended(client, second["id"])
    assert (job["state"], job["rc"]) == ("failed", 2)
    assert job["error"] == f"error: cannot start in {tmp_path / 'here'}: No such file or directory"


def test_requests_that_name_nothing_are_refused(client):
    answer = client.post("/api/jobs", json={"kind": "evaluate", "runs": ["a", "b"], "settings": {}})
    assert answer.status_code == 404 and "\n" not in answer.json()["error"]
    for number in ("1", "000009", "../x"):
        assert client.post("/api/job/stop", json={"id": number}).status_code == 404
    assert client.get("/api/job", params={"id": "000001/../000002"}).status_code == 404
    assert client.get("/api/jobs").json() == {"jobs": []}


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


def test_a_stop_on_a_full_disk_still_stops_the_run(client, tmp_path, monkeypatch):
    def full(_path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    job = start(client, "a", seconds=60, notes=str(tmp_path / "notes"))
    process_of(tmp_path / "outputs", job["id"])
    until(lambda: notes(tmp_path / "notes"))
    monkeypatch.setattr(job_module.Path, "touch", full)
    assert client.post("/api/job/stop", json={"id": job["id"]}).status_code == 200
    monkeypatch.undo()
    job = ended(client, job["id"])
    assert (job["state"], job["rc"]) == ("stopped", 130)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_taken_as_it_is(script, outputs, tmp_path, monkeypatch, number):
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / "site").mkdir()  # for the watchers
    (tmp_path / "site/sitecustomize.py").write_text(
        f"import fcntl\ndef flock(*_):\n    raise OSError({number}, 'x')\nfcntl.flock = flock\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setattr("fcntl.flock", flock)
    with queue_client(outputs) as client:
        assert ended(client, start(client, "a")["id"])["state"] == "done"
        job = start(client, "b", seconds=60, ignores=1, notes=str(tmp_path / "notes"))
        process_of(outputs, job["id"])
        until(lambda: notes(tmp_path / "notes"))
        client.post("/api/job/stop", json={"id": job["id"]})
        until(lambda: len(notes(tmp_path / "notes")) == 2)
        with pytest.raises(AssertionError):  # by the watcher, and not by the studio too
            until(lambda: len(notes(tmp_path / "notes")) > 2, 1)
        os.kill(notes(tmp_path / "notes")[0]["pid"], signal.SIGTERM)
        assert ended(client, job["id"])["state"] == "stopped"


def test_ten_threads_hold_a_lock_one_at_a_time(tmp_path):
    inside, most = [], []

    def hold(number: int) -> None:
        with take_lock(tmp_path / "lock"):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.002)
            inside.remove(number)

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(hold, range(50)))
    assert most == [1] * 50


def test_two_threads_may_forget_a_removed_job_at_once(outputs):
    class Racing(dict):
        def keys(self):  # as another thread has read them before it removed one
            return {"000009"}

    queue = jobs.Jobs(Studio(outputs))
    queue._ended = Racing()
    assert queue.all() == []


def test_what_has_no_room_to_start_waits_and_says_why(client, monkeypatch):
    monkeypatch.setattr(job_module, "MIN_FREE", 2**62)
    monkeypatch.setattr(jobs, "RETRY_SECONDS", 0.1)
    job = start(client, "a")
    until(lambda: look(client, job["id"])["error"])
    job = look(client, job["id"])
    assert job["state"] == "queued" and job["error"] == "the job cannot be started: No space left on device; make room"
    monkeypatch.setattr(job_module, "MIN_FREE", 0)
    job = ended(client, job["id"])
    assert (job["state"], job["error"]) == ("done", None)
