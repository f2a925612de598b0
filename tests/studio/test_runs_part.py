"""The addresses of runs in the whole studio: over HTTP, within a process that stays small."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.factories.studio_runs import make_run
from tests.factories.studio_server import running_studio

ADDRESSES = ("/api/runs", "/api/run", "/api/history", "/api/samples", "/api/compare", "/api/report")


@pytest.fixture(scope="module")
def studio(tmp_path_factory):
    outputs = tmp_path_factory.mktemp("studio") / "outputs"
    make_run(outputs, "demo/sft")
    make_run(outputs, "demo/ppo", "ppo", 12, parents=["demo/sft"], has_tools=True)
    make_run(outputs, "demo/live", "grpo", 4, "running", ["demo/sft"], max_steps=40)
    with running_studio(outputs) as found:
        yield found


def get(studio, path, **query):
    answer = studio.client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_run_is_told_with_all_that_its_page_shows(studio):
    rows = {row["id"]: row for row in get(studio, "/api/runs")["runs"]}
    found = get(studio, "/api/run", id="demo/ppo")
    assert found["row"] == rows["demo/ppo"] and found["notes"] == [] and found["children"] == []
    assert get(studio, "/api/run", id="demo/sft")["children"] == ["demo/live", "demo/ppo"]
    assert found["command"].startswith("train.py --stage ppo") and found["header"][0].startswith("data: 100 rows")
    assert found["settings"] == (studio.studio.outputs / "demo/ppo/config.yaml").read_text()
    assert found["versions"]["python"] == "3.11.7" and found["alarms"] == []
    phases = {each["name"]: each["seconds"] for each in found["phases"]}
    assert [phases[name] for name in ("generate", "score", "train")] == [3.0, 0.6, 1.8]  # 12 steps of 0.25, 0.05, 0.15
    assert list(phases)[-1] == "other" and 0 < phases["other"] < 1.5
    assert {each["name"]: each["bytes"] for each in found["memory"]} == {
        "actor/generate": 450 * 10**6, "reward/score": 480 * 10**6, "actor/update": 550 * 10**6 + 12}
    assert {"name": "entropy", "group": "entropy", "meaning": "entropy of the next token, in nats, mean; near 0 the "
            "policy explores no more"} in found["metrics"]
    assert found["checkpoints"][0]["name"] == "step-00000012" and found["checkpoints"][0]["bytes"] > 2000
    assert found["has_report"] and found["card"].endswith("A made-up model.\n")


def test_the_best_checkpoint_is_told_apart(studio):
    run = make_run(studio.studio.outputs, "best", "sft", 3, "running")
    run.checkpoint()
    run.grow(4)
    run.checkpoint(is_best=True)
    (run.folder / "checkpoints/.hybrid_rlhf-0123456789abcdef").mkdir()
    (run.folder / "checkpoints/step-x").mkdir()
    found = get(studio, "/api/run", id="best")
    assert [(c["name"], c["step"], c["is_best"]) for c in found["checkpoints"]] == [
        ("step-00000003", 3, False), ("best/step-00000007", 7, True)]
    assert found["card"] is None and not found["has_report"]


def test_curves_and_samples_are_told(studio):
    found = get(studio, "/api/history", id="demo/ppo", names="reward,eval/reward", points=6)
    assert found["step"] == 12 and found["series"]["reward"]["steps"] == [2, 4, 6, 8, 10, 12]
    assert found["series"]["eval/reward"]["steps"] == [12]
    assert get(studio, "/api/samples", id="demo/ppo")["samples"][0]["turns"][1] == {"who": "add", "text": "12"}
    rows = get(studio, "/api/compare", ids="demo/sft,demo/ppo")["runs"]
    assert [row["id"] for row in rows] == ["demo/sft", "demo/ppo"]


def test_a_report_may_do_nothing(studio):
    answer = studio.client.get("/api/report", params={"id": "demo/ppo"})
    assert answer.status_code == 200 and "Stage ppo" in answer.text
    assert answer.headers["content-security-policy"] == \
        "sandbox; default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert answer.headers["content-type"].startswith("text/html")
    assert studio.client.get("/api/report", params={"id": "demo/live"}).status_code == 404


@pytest.mark.parametrize("path", ADDRESSES[1:])
@pytest.mark.parametrize("name", ["", "none", "../x", "/etc", ".studio", "demo/../demo/sft", "demo//sft"])
def test_only_runs_are_told_of(studio, path, name):
    (studio.studio.outputs / ".studio").mkdir(exist_ok=True)
    answer = studio.client.get(path, params={"id": name, "ids": f"demo/sft,{name}"})
    assert answer.status_code in (400, 404) and len(answer.text) < 400


@pytest.mark.parametrize("path", ADDRESSES)
def test_nobody_without_the_token_is_told_anything(studio, path):
    assert httpx.get(studio.base + path, params={"id": "demo/sft"}).status_code == 401


@pytest.mark.slow
def test_an_open_page_hears_of_a_run_that_grows(studio):
    heard, has_opened = [], threading.Event()

    def listen():
        with studio.client.stream("GET", "/api/events") as answer:
            for line in answer.iter_lines():
                has_opened.set()
                heard.append(line)
                if line.startswith("data: ") and '"demo/fresh"' in line:
                    return

    thread = threading.Thread(target=listen)
    thread.start()
    assert has_opened.wait(20)
    run = make_run(studio.studio.outputs, "demo/fresh", "sft", 1, "running")
    for _ in range(60):
        thread.join(0.5)
        if not thread.is_alive():
            break
        run.grow(1)
    assert not thread.is_alive() and "event: run" in heard
    run.finish()


CHILD = """
import json, sys
from pathlib import Path
from starlette.testclient import TestClient
from hybrid_rlhf.studio.studio import Studio
from hybrid_rlhf.studio.studio_app import make_app, open_parts

studio = Studio(Path(sys.argv[1]).resolve())
routes, closers = open_parts(studio)
with TestClient(make_app(studio, routes, "t" * 32, 8090, closers), base_url="http://127.0.0.1:8090") as client:
    client.get("/", params={"token": "t" * 32})
    step = None
    for path in ("/api/runs", "/api/run?id=long", "/api/history?id=long&names=reward,loss", "/api/samples?id=long",
                 "/api/compare?ids=long,sft", "/api/report?id=sft"):
        answer = client.get(path)
        assert answer.status_code == 200, (path, answer.text)
        step = answer.json()["step"] if "history" in path else step
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
heavy = [name for name in ("torch", "transformers", "datasets", "deepspeed", "matplotlib") if name in sys.modules]
print(json.dumps({"step": step, "peak_mib": int(peak.split()[1]) / 1024, "heavy": heavy}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the process's memory")
def test_fifty_thousand_steps_are_shown_by_a_small_process(tmp_path):
    make_run(tmp_path, "sft")
    run = make_run(tmp_path, "long", "ppo", 0, "running")
    text = json.dumps({**run.values(1), **{f"group/metric_{i}": 0.1 * i for i in range(30)}})[1:]
    with (run.folder / "metrics.jsonl").open("w") as file:
        file.writelines(f'{{"step": {s}, {text}\n' for s in range(1, 50_001))
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, timeout=300,
                          check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["step"] == 50_000 and found["heavy"] == [] and found["peak_mib"] < 200
