"""The studio's queue with a launcher that is quick: it does what its settings say, and notes when."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from starlette.testclient import TestClient

from hybrid_rlhf.studio import exports, jobs, new_jobs, uploads
from hybrid_rlhf.studio.jobs import Jobs
from hybrid_rlhf.studio.studio import Studio
from hybrid_rlhf.studio.studio_app import make_app

ROOT = Path(__file__).resolve().parents[2]
TOKEN, PORT = "t" * 32, 8090
# Settings: say (a line), seconds (to run), gate (a file to wait for), rc, ignores (signals that it takes and does not
# end at), notes (a file that
# gets a line of JSON at its beginning, at each signal and at its end).
LAUNCHER = '''
import json, os, signal, sys, time
import yaml

settings = yaml.safe_load(open(sys.argv[sys.argv.index("--config") + 1]))
seen = []

def note(what):
    if "notes" in settings:
        with open(settings["notes"], "a") as file:
            file.write(json.dumps({"what": what, "run": settings.get("output_dir"), "time": time.monotonic(),
                                   "pid": os.getpid(), "group": os.getpgid(0), "session": os.getsid(0),
                                   "stdin": os.readlink("/proc/self/fd/0"), "cwd": os.getcwd(),
                                   "hangup": str(signal.getsignal(signal.SIGHUP)), "words": sys.argv[1:]}) + "\\n")

def hear(number, frame):
    seen.append(number)
    note("signal")
    if len(seen) > settings.get("ignores", 0):
        print("stopped with a checkpoint")
        note("end")
        os._exit(130)

signal.signal(signal.SIGTERM, hear)
note("begin")
if "say" in settings:
    print(settings["say"])
end = time.monotonic() + settings.get("seconds", 0)
while time.monotonic() < end or not os.path.exists(settings.get("gate", "/")):
    time.sleep(0.02)
note("end")
sys.exit(settings.get("rc", 0))
'''
# An export as the command makes one: a check on stderr, the paths that it wrote on stdout.
EXPORT = '''
import json, pathlib, sys
target = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
target.mkdir(parents=True)
(target / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
(target / "model.safetensors").write_bytes(bytes(3000))
(target / "README.md").write_text("# a model")
if "--ollama" in sys.argv:
    (target / "Modelfile").write_text("FROM ./x")
if "--gguf" in sys.argv:
    (target / f"{target.name}-{sys.argv[sys.argv.index('--gguf') + 1]}.gguf").write_bytes(b"GGUF")
print("warning: this is no check", file=sys.stderr)
print("reloaded in a fresh process: tokens equal, logits within 3e-07 (relative)", file=sys.stderr)
print(target)
print(json.dumps(sys.argv[1:]), file=open(target.parent / f"{target.name}.words", "w"))
'''
SERVER = '''
import sys
from hybrid_rlhf.studio import command, jobs
jobs.LAUNCHER = (sys.executable, sys.argv[1])
sys.exit(command.main(["--outputs", sys.argv[2], "--port", "0", "--no_browser"]))
'''


def use_quick_launcher(monkeypatch, folder: Path) -> Path:  # noqa: ANN001
    """Jobs run LAUNCHER. Returns the launcher's file."""
    script = folder / "quick_launcher.py"
    script.write_text(LAUNCHER)
    monkeypatch.setattr(jobs, "LAUNCHER", (sys.executable, str(script)))
    monkeypatch.setattr(jobs, "LOOK_SECONDS", 0.05)
    return script


@contextmanager
def queue_client(outputs: Path, *, is_open: bool = True) -> Iterator[TestClient]:
    """Who has been let in to a studio of the parts that this is about. is_open: whether it runs the queue."""
    studio = Studio(outputs.resolve())
    queue = Jobs(studio)
    if is_open:
        queue.open()
    routes = [*new_jobs.routes(studio, queue), *exports.routes(studio, queue), *uploads.routes(studio)]
    with TestClient(make_app(studio, routes, TOKEN, PORT, [queue.close]), base_url=f"http://127.0.0.1:{PORT}",
                    follow_redirects=False) as client:
        assert client.get("/", params={"token": TOKEN}).status_code == 303
        yield client


class StudioProcess:
    """A studio that is a process of its own, as users have it, with the quick launcher."""

    def __init__(self, script: Path, outputs: Path) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", SERVER, str(script), str(outputs)], text=True,
                                        stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
        line = self.process.stderr.readline()
        base, token = re.search(r"(http://[\d.:]+)/\?token=(\S+)", line).groups()
        self.client = httpx.Client(base_url=base, timeout=30)
        until(lambda: self._is_open(token))

    def _is_open(self, token: str) -> bool:
        try:
            return self.client.get("/", params={"token": token}).status_code == 303
        except httpx.ConnectError:
            return False

    def end(self, number: int = signal.SIGTERM) -> int:
        self.client.close()
        self.process.send_signal(number)
        self.process.stderr.close()
        return self.process.wait(120)


def until(condition: Callable[[], object], seconds: float = 120) -> object:
    """What `condition` says as soon as it says anything."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.03)
    return found


def start(client, run: str, *, stage: str = "sft", **settings: object) -> dict:  # noqa: ANN001
    """A training job."""
    answer = client.post("/api/jobs", json={"kind": "train", "stage": stage, "run": run, "settings": settings})
    assert answer.status_code == 200, answer.text
    return answer.json()


def look(client, number: str) -> dict:  # noqa: ANN001
    return client.get("/api/job", params={"id": number}).json()["job"]


def ended(client, number: str, seconds: float = 120) -> dict:  # noqa: ANN001
    """The job as soon as it has ended."""
    return until(lambda: (job := look(client, number))["state"] not in ("queued", "running") and job, seconds)


def stop_all(client) -> None:  # noqa: ANN001
    """What a test that has failed left behind, whose processes would go on without the studio."""
    for job in client.get("/api/jobs").json()["jobs"]:
        if job["state"] in ("queued", "running"):
            client.post("/api/job/stop", json={"id": job["id"]})


def notes(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def process_of(outputs: Path, number: str) -> dict:
    """process.json with the numbers of watcher and process."""
    path = outputs / ".studio/jobs" / number / "process.json"
    return until(lambda: path.exists() and (found := json.loads(path.read_text()))["process"] and found)
