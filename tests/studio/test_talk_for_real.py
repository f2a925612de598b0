"""The chat with real models: what a checkpoint says, a reader who leaves, and a studio that is killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from hybrid_rlhf.cli import main
from hybrid_rlhf.studio.talk import Talk
from tests.factories.processes import ROOT
from tests.factories.studio_runs import make_run
from tests.factories.studio_server import TOKEN, running_studio
from tests.factories.tiny import own_cache, save_tiny
from tests.inference.server.tiny_server import alone, asked, content, running, until

CHAT = "/api/talk/v1/chat/completions"


def real_run(outputs: Path, name: str, **changes) -> None:
    """A finished run whose model is a tiny one."""
    model = make_run(outputs, name).folder / "model"
    shutil.rmtree(model)
    save_tiny(model, **changes)


def opened(client: httpx.Client, *models: str) -> dict:
    found = client.post("/api/talk/open", json={"models": list(models)}).json()
    end = time.monotonic() + 120
    while found["state"] == "starting" and time.monotonic() < end:
        time.sleep(0.1)
        found = client.get("/api/talk").json()
    assert found["state"] == "ready", found
    return found


@pytest.mark.slow
def test_a_checkpoint_of_adapters_says_what_the_weights_of_its_step_say(tmp_path, monkeypatch):
    """Greedily, against a run that ended at that step; the run's own last model says something else."""
    own_cache(monkeypatch, tmp_path / "cache")
    base, outputs = save_tiny(tmp_path / "base"), tmp_path / "outputs"
    rows = [{"messages": [{"role": "user", "content": f"say {w} {i}"}, {"role": "assistant", "content": w}]}
            for i in range(4) for w in ("red", "a small dog", "blue", "fox")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    for name, steps in (("longer", 12), ("shorter", 6)):
        assert main(["sft", "--model", base, "--output_dir", str(outputs / name), "--data.max_length", "48",
                     f"--data.sources=[{{path: {tmp_path}/rows.jsonl}}]", "--data.eval_fraction", "0",
                     "--train.max_steps", str(steps), "--train.save_steps", "6", "--train.learning_rate", "2e-2",
                     "--train.lr_scheduler_type", "constant", "--train.num_fixed_prompts", "0",
                     "--train.per_device_train_batch_size", "8", "--model.lora.r", "8"]) == 0
    greedy = dict(temperature=0.0, max_new_tokens=12)
    expected, last = (alone(str(outputs / name / "model"), "say fox 2", 0, **greedy) for name in ("shorter", "longer"))
    assert expected != last
    record = json.loads((outputs / "longer" / "run.json").read_text())
    (outputs / "longer" / "run.json").write_text(json.dumps(record | {"status": "running", "finished": None}))
    shutil.rmtree(outputs / "longer" / "checkpoints" / "step-00000012")
    with running_studio(outputs) as studio:
        found = opened(studio.client, "longer")
        assert found["models"] == [{"name": "longer", "id": "longer", "step": 6}]
        answer = studio.client.post(CHAT, json=asked("say fox 2", temperature=0, max_tokens=12))
        assert content(answer) == expected
        assert list((outputs / ".studio" / "talk").iterdir()) == []


def test_a_reader_who_leaves_ends_the_answer(tmp_path, monkeypatch):
    key = "correct horse battery"
    model = {"m": save_tiny(tmp_path / "m", max_position_embeddings=8192)}
    endless = asked("hi", max_tokens=8000, temperature=0)
    with running(model, api_key=key, capacity=8192) as served, running_studio(tmp_path / "outputs") as studio:
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
def test_a_studio_that_is_killed_takes_its_models_along(tmp_path):
    outputs = tmp_path / "outputs"
    real_run(outputs, "a run")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    studio = subprocess.Popen([sys.executable, "-m", "hybrid_rlhf", "studio", "--outputs", str(outputs), "--port", "0",
                               "--no_browser"], stderr=subprocess.PIPE, text=True, env=env)
    try:
        port, token = re.search(r":(\d+)/\?token=(\S+)", studio.stderr.readline()).groups()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            assert client.get("/", params={"token": token}).status_code == 303
            assert opened(client, "a run")["models"][0]["name"] == "a-run"
            assert content(client.post(CHAT, json=asked("hi", max_tokens=3))) is not None
        child, = _children(studio.pid)
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        secret = next(line for line in Path(f"/proc/{child}/environ").read_text().split("\0")
                      if line.startswith("HYBRID_RLHF_API_KEY=")).partition("=")[2]
        assert "serve" in words and not any(secret in word or token in word for word in words)
        studio.send_signal(signal.SIGKILL)
        studio.wait(10)
        assert until(lambda: not _is_there(child), 15)
    finally:
        studio.kill()
        studio.wait(10)
        studio.stderr.close()


def _children(pid: int) -> list[int]:
    return [int(each) for task in Path(f"/proc/{pid}/task").iterdir()
            for each in (task / "children").read_text().split()]


def _is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_studio_s_process_computes_nothing(tmp_path):
    """Nor does it import what does, which takes seconds and gigabytes."""
    script = ("import sys\nfrom pathlib import Path\nfrom hybrid_rlhf.studio import command\n"
              "from hybrid_rlhf.studio.studio import Studio\n"
              "from hybrid_rlhf.studio.studio_app import make_app, open_parts\n"
              f"studio = Studio(Path({str(tmp_path)!r}).resolve())\nroutes, closers = open_parts(studio)\n"
              f"make_app(studio, routes, {TOKEN!r}, 8090, closers)\n"
              "heavy = {'torch', 'transformers', 'datasets', 'deepspeed'} & set(sys.modules)\n"
              "assert not heavy, heavy\n")
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
