"""One job: its process, state and output, also after its studio or its watcher was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest

from hybrid_rlhf.studio import job
from hybrid_rlhf.studio.job import find_process, process_note, read_job, read_output
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
def folder(tmp_path):
    facts = {"kind": "train", "title": "x", "stage": "sft", "run": "a", "name": None, "created": "",
             "folder": str(tmp_path), "words": [sys.executable, "-c", "raise SystemExit(4)"]}
    (tmp_path / "000001").mkdir()
    (tmp_path / "000001/job.json").write_text(json.dumps(facts))
    return tmp_path / "000001"


def state_of(folder):
    return read_job(folder, json.loads((folder / "job.json").read_text()))


def test_a_job_that_ends_between_two_looks_is_not_lost(folder, monkeypatch):
    def look(_note):
        (folder / "end.json").write_text('{"rc": 0}')

    (folder / "process.json").write_text(json.dumps({"started": "then", "watcher": None, "process": None}))
    assert state_of(folder).state == "lost"
    monkeypatch.setattr(job, "find_process", look)
    assert state_of(folder).state == "done"


def test_a_job_of_an_earlier_release_is_read(folder):
    """Its job.json has a mark, its process.json tells a process by its tick of the clock."""
    facts = json.loads((folder / "job.json").read_text()) | {"mark": "0" * 64}
    (folder / "job.json").write_text(json.dumps(facts))
    (folder / "process.json").write_text(json.dumps({
        "started": "then", "watcher": {"pid": os.getpid(), "began": "12345", "where": "boot"}, "process": None}))
    assert state_of(folder).state == "lost"
    (folder / "end.json").write_text('{"rc": 130, "finished": "2026-11-26T10:00:00+00:00"}'.ljust(4096))
    found = state_of(folder)
    assert (found.state, found.started, found.finished) == ("stopped", "then", "2026-11-26T10:00:00+00:00")


def test_a_process_is_known_until_it_ends_and_no_other_is_taken_for_it():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    note = process_note(process.pid)
    assert find_process(note).pid == process.pid
    assert find_process({**note, "began": note["began"] - 60}) is None  # an earlier process of the same number
    assert find_process(None) is find_process({"pid": process.pid}) is None
    find_process(note).send_signal(signal.SIGTERM)
    until(lambda: find_process(note) is None)  # ended, though its parent has not asked how
    assert process.wait(120) == -signal.SIGTERM
    process.stdin.close()


def test_output_is_read_in_pieces_that_break_no_character(tmp_path):
    path = tmp_path / "out.log"
    path.write_bytes("a\x1bb\r\nc\rdé".encode())
    assert read_output(path, None) == ("a␛b\nc\ndé", 10)
    assert read_output(path, 6) == ("\ndé", 10)
    path.write_bytes("xé".encode()[:2])
    assert read_output(path, 0) == ("x", 1)
    assert read_output(path, 99) == ("", 2)
    path.write_bytes(b"x\xff")  # not UTF-8
    assert read_output(path, 0) == ("x�", 2)
    for char in ("é", "😀"):  # the newest 64 KiB, from the beginning of a line
        text = f"first{char * 50000}\n" + "".join(f"line {i} {char}\n" for i in range(8000))
        path.write_text(text, encoding="utf-8")
        found, end = read_output(path, None)
        assert end == path.stat().st_size and text.endswith("\n" + found) and len(found.encode()) > 60000
        whole, at = "", 0
        while at < end:
            piece, at = read_output(path, at)
            assert 0 < len(piece.encode()) <= 2**16
            whole += piece
        assert whole == text
    assert read_output(tmp_path / "none", None) == ("", 0)


def test_the_studio_and_its_watchers_are_small():
    """torch and the like are imported by the jobs alone: the page stays quick, and no memory of theirs is taken."""
    code = ("import sys; from hybrid_rlhf.studio import command, job, studio_app; "
            "print(sorted({'torch', 'transformers', 'datasets', 'deepspeed', 'numpy', 'pandas'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


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


def test_a_run_whose_watcher_is_killed_still_counts_and_still_stops(script, outputs, tmp_path):
    with queue_client(outputs) as client:
        job = start(client, "a", seconds=60, notes=str(tmp_path / "notes"))
        waiting = start(client, "b")
        found = process_of(outputs, job["id"])
        until(lambda: notes(tmp_path / "notes"))
        os.kill(found["watcher"]["pid"], signal.SIGKILL)
        until(lambda: find_process(found["watcher"]) is None)
        assert look(client, job["id"])["state"] == "running" and look(client, waiting["id"])["state"] == "queued"
        client.post("/api/job/stop", json={"id": job["id"]})
        job = ended(client, job["id"])
        assert (job["state"], job["rc"]) == ("lost", None) and "not known" in job["error"]
        assert [row["what"] for row in notes(tmp_path / "notes")] == ["begin", "signal", "end"]
        assert ended(client, waiting["id"])["state"] == "done"
