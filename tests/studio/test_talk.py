"""The chat's process: begun, told of, changed, closed; what it is made from; and the way through to it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from hybrid_rlhf.studio import chat_process
from hybrid_rlhf.studio.run_history import Histories
from hybrid_rlhf.studio.runs import RunList
from hybrid_rlhf.studio.studio import Refused, Studio
from hybrid_rlhf.studio.studio_app import make_app
from hybrid_rlhf.studio.talk import Talk, routes
from tests.factories.processes import ROOT
from tests.factories.studio_runs import make_run
from tests.factories.studio_server import TOKEN, running_studio
from tests.factories.tiny import save_tiny
from tests.inference.server.tiny_server import asked, content, until
from tests.inference.server.tiny_server import running as serving_models

DOUBLE = (sys.executable, str(Path(__file__).parent / "chat_double.py"))
PORT = 8090


@pytest.fixture
def studio(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_process, "COMMAND", DOUBLE)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    outputs = (tmp_path / "outputs").resolve()
    for name in ("demo/sft", "demo/ppo", "dpo"):
        make_run(outputs, name, name.rpartition("/")[2])
    make_run(outputs, "demo/reward", "reward")
    return Studio(outputs)


def talk_of(studio, **options) -> Talk:
    return Talk(studio, RunList(studio, Histories()), **options)


@pytest.fixture
def talk(studio):
    made = talk_of(studio)
    yield made
    made.end()


@pytest.fixture
def client(studio, talk):
    app = make_app(studio, routes(talk), TOKEN, PORT)
    with TestClient(app, base_url=f"http://127.0.0.1:{PORT}", cookies={f"studio_{PORT}": TOKEN}) as found:
        yield found


def does(studio, name: str, *lines: str) -> None:
    (studio.outputs / name / "model" / "does").write_text("\n".join(lines))


def notes(studio) -> list[dict]:
    path = studio.outputs.parent / "notes"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait(talk, state: str, seconds: float = 120) -> dict:
    end = time.monotonic() + seconds
    while talk.state()["state"] != state:
        assert time.monotonic() < end, talk.state()
        time.sleep(0.01)
    return talk.state()


def opened(talk, *models: str, **more) -> dict:
    talk.open({"models": list(models), **more})
    return wait(talk, "ready")


# -- opening ---------------------------------------------------------------------------------------------------------


def test_models_are_opened_by_names_that_the_server_takes_and_what_it_says_is_told(studio, talk):
    found = opened(talk, "demo/sft", "demo/ppo", reward="demo/reward", is_on_cpu=True)
    assert found["models"] == [{"name": "demo-sft", "id": "demo/sft", "step": None},
                               {"name": "demo-ppo", "id": "demo/ppo", "step": None}]
    assert (found["reward"], found["error"], found["doing"]) == (True, "", "")
    assert found["notes"] == ["note: a line beside"]
    begun, = notes(studio)
    assert begun["words"][1:4] == ["serve", "--port", "0"]
    models = [begun["words"][i + 1] for i, word in enumerate(begun["words"]) if word == "--model"]
    assert models == [f"demo-sft={studio.outputs}/demo/sft/model", f"demo-ppo={studio.outputs}/demo/ppo/model"]
    assert begun["words"][-2:] == ["--reward_model", f"{studio.outputs}/demo/reward/model"]
    assert begun["cards"] == ""


def test_a_folder_and_a_hub_id_are_opened_beside_a_run(studio, talk, tmp_path):
    base = save_tiny(tmp_path / "base")
    talk.open({"models": ["dpo"], "paths": [str(base), "some-one/a.model"]})
    found = wait(talk, "ready")
    assert [model["id"] for model in found["models"]] == ["dpo", str(base), "some-one/a.model"]
    begun, = notes(studio)
    models = [begun["words"][i + 1].partition("=")[2] for i, word in enumerate(begun["words"]) if word == "--model"]
    assert models == [f"{studio.outputs}/dpo/model", str(base), "some-one/a.model"]
    for path in (str(tmp_path), "/no/such/folder", "--model", "a/b/c", "", "one"):
        with pytest.raises(Refused, match="neither a model folder"):
            talk.open({"models": [], "paths": [path]})


def test_the_key_is_in_the_environment_and_not_on_the_command_line(studio, talk):
    opened(talk, "dpo")
    begun, = notes(studio)
    assert len(begun["key"]) >= 32
    assert not any(begun["key"] in word for word in begun["words"])
    assert begun["cards"] is None
    assert begun["key"] not in json.dumps(talk.state())


@pytest.mark.parametrize(("lines", "error"), [
    (["fail", "error: out of memory (while loading x); take less"], "out of memory (while loading x); take less"),
    (["fail", "error: first", "error: x has no chat template", "note: bye"], "x has no chat template"),
    (["fail"], "the process ended with exit code 2"), (["killed", "hm"], "the process was killed, as the system does")])
def test_what_keeps_it_from_starting_is_its_last_error(studio, talk, lines, error):
    does(studio, "dpo", *lines)
    talk.open({"models": ["dpo"]})
    assert wait(talk, "failed")["error"].startswith(error)
    with pytest.raises(Refused, match="no model is open"):
        talk.address()
    does(studio, "dpo", "work")
    assert opened(talk, "dpo")["error"] == ""


def test_another_choice_ends_the_processes_before_and_the_same_one_does_not(studio, talk, monkeypatch):
    monkeypatch.setenv("SLOW_END", "0.5")
    opened(talk, "dpo")
    opened(talk, "dpo")
    assert len(notes(studio)) == 1
    talk.open({"models": ["demo/sft"]})
    assert talk.state()["state"] == "starting"
    assert wait(talk, "ready")["models"][0]["id"] == "demo/sft"
    first, ended, second = notes(studio)
    assert (ended["what"], ended["pid"], second["what"]) == ("end", first["pid"], "begin")
    assert first["key"] != second["key"]


def test_closing_ends_the_process_also_while_it_starts(studio, talk):
    for how, state in (("work", "ready"), ("hang", "starting")):
        does(studio, "dpo", how)
        talk.open({"models": ["dpo"]})
        wait(talk, state)
        while not notes(studio) or notes(studio)[-1]["what"] != "begin":
            time.sleep(0.01)
        assert talk.close()["state"] == "closed"
        assert notes(studio)[-1]["what"] == "end"


@pytest.mark.slow
def test_it_closes_when_nobody_has_asked_for_a_while_and_not_during_a_request(studio):
    talk = talk_of(studio, idle_seconds=3.0)
    try:
        with talk.using():  # from the start: a slow test does not lose it before it looks
            opened(talk, "dpo")
            time.sleep(4)
            assert talk.state()["state"] == "ready"
        found = wait(talk, "closed")
        assert found["notes"] == ["closed after 0.05 minutes without a question"]
    finally:
        talk.end()


@pytest.mark.parametrize(("body", "status", "text"), [
    ({"models": []}, 400, "choose a model"), ({"models": ["none"]}, 404, "no run"),
    ({"models": ["../x"]}, 404, "no run"), ({"models": ["demo/reward"]}, 400, "cannot answer"),
    ({"models": ["dpo"], "reward": "dpo"}, 400, "gives no scores"),
    ({"models": ["evaluation"]}, 404, "no model"),
    ({"models": ["new"]}, 409, "new: it has no checkpoint yet")])
def test_what_cannot_be_talked_to_is_refused(studio, talk, body, status, text):
    make_run(studio.outputs, "evaluation", "evaluate")
    new = make_run(studio.outputs, "new", "sft", status="running")
    with pytest.raises(Refused, match=text) as caught:
        talk.open(body)
    assert caught.value.status == status
    assert notes(studio) == []
    new.die()


# -- models of checkpoints -------------------------------------------------------------------------------------------


def test_all_that_can_be_talked_to_is_listed_with_what_it_would_be(studio, talk):
    running = make_run(studio.outputs, "a/b/c/running", "grpo", status="running")
    running.checkpoint()
    make_run(studio.outputs, "stopped", "sft", steps=30, status="stopped")
    make_run(studio.outputs, "failed", "sft", status="failed")
    lost = make_run(studio.outputs, "lost", "sft", status="lost", steps=5)
    lost.checkpoint()
    rows = {row["id"]: (row["status"], row["step"], row["kind"], row["why"])
            for row in (run.shape() for run in talk.talkables())}
    assert rows == {
        "demo/sft": ("finished", None, "policy", None), "demo/ppo": ("finished", None, "policy", None),
        "dpo": ("finished", None, "policy", None), "demo/reward": ("finished", None, "reward model", None),
        "a/b/c/running": ("running", 20, "policy", None), "stopped": ("stopped", 30, "policy", None),
        "failed": ("failed", None, "policy", "it left no model and no checkpoint"), "lost": ("lost", 5, "policy", None)}
    running.die()


@pytest.fixture
def running(studio):
    made = make_run(studio.outputs, "run", "sft", status="running", steps=4)
    yield made
    made.die()


def test_a_running_run_answers_from_its_newest_checkpoint(studio, talk, running):
    running.checkpoint()
    running.grow(4)
    newest = running.checkpoint()
    (newest.parent / "step-00000012").mkdir()  # not yet whole
    doing, plain = [], talk._changed
    talk._changed = lambda: (doing.append(talk.state()["doing"]), plain())
    found = opened(talk, "run")
    assert found["models"] == [{"name": "run", "id": "run", "step": 8}]
    assert {"making the model of run at step 8 from its checkpoint", "loading run"} <= {*doing}
    made, served = [each for each in notes(studio) if each["what"] == "begin"]
    assert made["words"][1:4] == ["export", "--model", str(newest)]
    assert served["words"][-1] == f"run={made['words'][5]}"
    assert Path(made["words"][5]).is_relative_to(studio.home / "talk")
    assert list((studio.home / "talk").iterdir()) == []  # it is in memory


def test_a_checkpoint_that_the_run_removes_meanwhile_is_followed_by_a_newer_one(studio, talk, running):
    (running.checkpoint() / "does").write_text("vanish\nerror: gone")
    assert opened(talk, "run")["state"] == "ready"
    made = [Path(each["words"][3]).name for each in notes(studio) if each["words"][1] == "export"]
    assert made == ["step-00000004", "step-00000009"]


def test_a_checkpoint_that_gives_no_model_is_told_with_its_run(studio, talk, running):
    (running.checkpoint() / "does").write_text("fail\nerror: in parts of 2 processes")
    talk.open({"models": ["run"]})
    assert wait(talk, "failed")["error"] == "run: in parts of 2 processes"
    assert list((studio.home / "talk").iterdir()) == []


# -- learning from marks ---------------------------------------------------------------------------------------------


def test_one_model_learns_in_a_run_of_its_own_and_goes_on_there(studio, talk):
    assert opened(talk, "demo/sft", learn="demo/taught")["learn"] == "demo/taught"
    taught = make_run(studio.outputs, "demo/taught", "chat", parents=["demo/sft"],
                      settings={"model.model_name_or_path": f"{studio.outputs}/demo/sft/model"})
    shutil.rmtree(taught.folder / "model")  # it has not been saved yet
    talk.close()
    assert opened(talk, "demo/taught", learn="demo/taught")["models"] == [
        {"name": "demo-taught", "id": "demo/taught", "step": None}]
    words = [note["words"] for note in notes(studio) if note["what"] == "begin"]
    assert [(each[each.index("--model") + 1].split("=")[1], each[each.index("--learn") + 1]) for each in words] == [
        (f"{studio.outputs}/demo/sft/model", f"{studio.outputs}/demo/taught")] * 2
    talk.close()
    assert opened(talk, "dpo")["learn"] is None


@pytest.mark.parametrize(("body", "status", "text"), [
    ({"models": ["dpo", "demo/sft"], "learn": "t"}, 400, "one model learns"),
    ({"models": ["dpo"], "learn": "../t"}, 400, "a run's name has letters"),
    ({"models": ["dpo"], "learn": ""}, 400, "a run's name has letters"),
    ({"models": ["dpo"], "learn": "dpo"}, 409, "dpo has not learnt from marks"),
    ({"models": ["dpo"], "learn": "demo/sft"}, 409, "demo/sft has not learnt from marks"),
    ({"models": ["stopped"], "learn": "t"}, 409, "stopped has no finished model to learn on")])
def test_what_cannot_learn_is_refused_before_anything_is_loaded(studio, talk, body, status, text):
    make_run(studio.outputs, "stopped", "sft", status="stopped")
    with pytest.raises(Refused, match=text) as caught:
        talk.open(body)
    assert caught.value.status == status and notes(studio) == []


def test_a_run_that_could_not_be_opened_is_not_kept_as_the_one_that_learns(studio, talk):
    does(studio, "dpo", "fail", "error: no room")
    talk.open({"models": ["dpo"], "learn": "mine"})
    assert wait(talk, "failed")["learn"] is None


def test_marks_go_to_the_server_of_the_model_that_learns(client, talk):
    opened(talk, "dpo", learn="taught")
    assert client.get("/api/talk/v1/marks").json()["path"] == "/v1/marks"
    for what in ("", "/undo", "/save"):
        assert client.post(f"/api/talk/v1/marks{what}", json={}).json()["path"] == f"/v1/marks{what}"


# -- the way through -------------------------------------------------------------------------------------------------


def test_of_a_request_the_content_type_alone_is_passed_on_and_of_an_answer_no_cookie(client, talk, studio):
    opened(talk, "dpo", reward="demo/reward")
    for path, address in (("/api/talk/v1/chat/completions", "/v1/chat/completions"), ("/api/talk/score", "/score")):
        answer = client.post(path, json={"x": 1}, headers={"x-secret": "1", "authorization": "Bearer mine"})
        assert answer.status_code == 200
        seen = {name.lower(): value for name, value in answer.json()["headers"].items()}
        assert answer.json()["path"] == address
        assert seen["authorization"] == f"Bearer {notes(studio)[0]['key']}"
        assert seen.keys() == {"host", "authorization", "content-type", "content-length"}
        assert answer.headers.keys() == {"content-type", "retry-after", "cache-control", "content-length"}
    assert client.get("/api/talk/v1/models").json()["path"] == "/v1/models"


def test_errors_and_too_many_requests_keep_their_status(client, talk):
    opened(talk, "dpo")
    for status in (400, 429, 503):
        answer = client.post("/api/talk/v1/chat/completions", json={"status": status})
        assert (answer.status_code, answer.headers["retry-after"]) == (status, "7")


def test_bodies_are_bounded_and_nothing_is_asked_of_nobody(client, talk):
    assert client.post("/api/talk/v1/chat/completions", json={}).json()["error"].startswith("no model is open")
    opened(talk, "dpo")
    answer = client.post("/api/talk/v1/chat/completions", content=b"x" * (20 * 2**20 + 1))
    assert answer.status_code == 413
    assert answer.json()["error"] == "the request is too large; shorten it, or start a new conversation"
    assert client.post("/api/talk/score", json={}).status_code == 409


def test_a_stream_that_breaks_ends_with_an_error_and_the_state_says_so(client, talk):
    opened(talk, "dpo")
    answer = client.post("/api/talk/v1/chat/completions", json={"how": "stream", "events": 3, "breaks": True})
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[:3] == ["data: 0", "data: 1", "data: 2"]
    assert "has ended" in json.loads(lines[3].removeprefix("data: "))["error"]["message"]
    wait(talk, "failed")


# -- with real models ------------------------------------------------------------------------------------------------


CHAT = "/api/talk/v1/chat/completions"


def opened_by(client: httpx.Client, *models: str, **more: str) -> dict:
    found = client.post("/api/talk/open", json={"models": list(models), **more}).json()
    end = time.monotonic() + 120
    while found["state"] == "starting" and time.monotonic() < end:
        time.sleep(0.1)
        found = client.get("/api/talk").json()
    assert found["state"] == "ready", found
    return found


def with_a_run(folder: Path) -> Path:
    """The studio's folder, with a run whose model answers."""
    outputs = folder / "outputs"
    model = make_run(outputs, "a run").folder / "model"
    shutil.rmtree(model)
    save_tiny(model)
    return outputs


def test_a_reader_who_leaves_ends_the_answer(tmp_path, monkeypatch):
    key = "correct horse battery"
    model = {"m": save_tiny(tmp_path / "m", max_position_embeddings=8192)}
    endless = asked("hi", max_tokens=8000, temperature=0)
    with serving_models(model, api_key=key, capacity=8192) as served, running_studio(tmp_path / "outputs") as studio:
        monkeypatch.setattr(Talk, "address", lambda *_: (served.port, key))
        with studio.client.stream("POST", CHAT, json=endless | {"stream": True}) as answer:
            pieces = answer.iter_text()
            first, second = next(pieces), next(pieces)  # they come as they are made
            assert first.startswith("data: ") and second.startswith("data: ")
            assert served.models[0].num_open == 1
        assert until(lambda: served.models[0].num_open == 0)
        with pytest.raises(httpx.ReadTimeout):  # before anything has come
            studio.client.post(CHAT, json=endless, timeout=0.2)
        assert until(lambda: served.models[0].num_open == 0)
        assert content(studio.client.post(CHAT, json=asked("hi", max_tokens=3))) is not None


@pytest.mark.slow
def test_the_model_learns_at_once_and_the_next_studio_goes_on_with_its_marks(tmp_path):
    outputs = with_a_run(tmp_path)
    mark = {"kind": "pair", "how": "edited", "prompt": asked("Which animal?")["messages"],
            "chosen": "a little red fox", "rejected": "the sun"}

    def said(client: httpx.Client) -> list:
        body = asked("Which animal?", temperature=0, max_tokens=6, logprobs=True)
        return client.post(CHAT, json=body, timeout=120).json()["choices"][0]["logprobs"]["content"]

    with running_studio(outputs) as studio:
        assert opened_by(studio.client, "a run", learn="taught")["learn"] == "taught"
        start = said(studio.client)
        told = studio.client.post("/api/talk/v1/marks", json=mark, timeout=120).json()
        assert told["line"].startswith("p(preferred) ") and len(told["marks"]) == 1
        learnt = said(studio.client)
        os.kill(_server(outputs), signal.SIGKILL)  # the mark is in a checkpoint
        assert until(lambda: studio.client.get("/api/talk").json()["state"] == "failed")
        assert opened_by(studio.client, "taught", learn="taught")["state"] == "ready"
        assert studio.client.get("/api/talk/v1/marks").json()["marks"] == told["marks"]
        assert said(studio.client) == learnt != start
        undone = studio.client.post("/api/talk/v1/marks/undo", json={"number": 1}, timeout=120).json()
        assert undone["marks"] == [] and said(studio.client) == start
        for what, body in (("", mark), ("/save", {})):
            assert studio.client.post(f"/api/talk/v1/marks{what}", json=body, timeout=120).status_code == 200
        run = next(row for row in studio.client.get("/api/runs").json()["runs"] if row["id"] == "taught")
        assert (run["status"], run["has_model"], run["parents"]) == ("finished", True, ["a run"])


@pytest.mark.slow
def test_a_studio_that_is_killed_takes_its_models_along(tmp_path):
    outputs = with_a_run(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    studio = subprocess.Popen([sys.executable, "-m", "hybrid_rlhf", "studio", "--outputs", str(outputs), "--port", "0",
                               "--no_browser"], stderr=subprocess.PIPE, text=True, env=env)
    try:
        port, token = re.search(r":(\d+)/\?token=(\S+)", studio.stderr.readline()).groups()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            assert client.get("/", params={"token": token}).status_code == 303
            assert opened_by(client, "a run")["models"][0]["name"] == "a-run"
            assert content(client.post(CHAT, json=asked("hi", max_tokens=3))) is not None
        child = _server(outputs)
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        secret = next(line for line in Path(f"/proc/{child}/environ").read_text().split("\0")
                      if line.startswith("HYBRID_RLHF_API_KEY=")).partition("=")[2]
        assert not any(secret in word or token in word for word in words)
        studio.send_signal(signal.SIGKILL)
        studio.wait(60)
        assert until(lambda: not _is_there(child))
    finally:
        studio.kill()
        studio.wait(60)
        studio.stderr.close()


def _server(outputs: Path) -> int:
    """The process that serves the models of a folder."""
    for folder in Path("/proc").iterdir():
        with suppress(OSError):  # no process, or it has ended meanwhile
            words = (folder / "cmdline").read_bytes()
            if b"\0serve\0" in words and bytes(outputs) in words:
                return int(folder.name)
    raise AssertionError("nothing serves them")


def _is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
