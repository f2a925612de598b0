"""What the addresses of runs tell: one run, curves, runs beside each other; and what open pages hear of."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_rlhf.studio.run_history import Histories
from hybrid_rlhf.studio.run_pages import Watcher, compare, differing, side_by_side
from hybrid_rlhf.studio.runs import RunList
from hybrid_rlhf.studio.settings_text import flat
from hybrid_rlhf.studio.studio import Refused, Studio
from tests.factories.studio_runs import PROMPTS, make_run
from tests.factories.studio_server import running_studio


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


@pytest.mark.parametrize("path", ["/api/run", "/api/history", "/api/samples", "/api/compare", "/api/report"])
def test_only_runs_are_told_of(studio, path):
    for name in ("", "none", "../x", "demo/../demo/sft"):
        answer = studio.client.get(path, params={"id": name, "ids": f"demo/sft,{name}"})
        assert answer.status_code in (400, 404) and len(answer.text) < 400


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
    step, base = None, sys.argv[2]
    settings = {"model.model_name_or_path": f"{base}/base", "data.sources": [f"{base}/sft.jsonl"]}
    for path in ("/api/runs", "/api/run?id=long", "/api/history?id=long&names=reward,loss", "/api/samples?id=long",
                 "/api/compare?ids=long,sft", "/api/report?id=sft", "/api/goals", "/api/options?stage=sft"):
        answer = client.get(path)
        assert answer.status_code == 200, (path, answer.text)
        step = answer.json()["step"] if "history" in path else step
    for kind, more in (("settings", {}), ("data", {"path": f"{base}/sft.jsonl"}), ("preview", {}), ("plan", {})):
        answer = client.post(f"/api/{kind}", json={"stage": "sft", "settings": settings, **more})
        assert answer.status_code == 200, (kind, answer.text)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
heavy = [name for name in ("torch", "transformers", "datasets", "deepspeed", "peft", "pyarrow",
                          "tokenizers", "matplotlib") if name in sys.modules]
print(json.dumps({"step": step, "peak_mib": int(peak.split()[1]) / 1024, "heavy": heavy}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the process's memory")
def test_runs_and_new_runs_are_shown_by_a_small_process_without_torch(tmp_path, place):
    make_run(tmp_path, "sft")
    run = make_run(tmp_path, "long", "ppo", 0, "running")
    text = json.dumps({**run.values(1), **{f"group/metric_{i}": 0.1 * i for i in range(30)}})[1:]
    with (run.folder / "metrics.jsonl").open("w") as file:
        file.writelines(f'{{"step": {s}, {text}\n' for s in range(1, 50_001))
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), str(place)], capture_output=True, text=True,
                          timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["step"] == 50_000 and found["heavy"] == [] and found["peak_mib"] < 200


def ask(outputs, ids):
    histories = Histories()
    return compare(RunList(Studio(outputs), histories), histories, ids)


def test_two_runs_are_told_beside_each_other(tmp_path):
    make_run(tmp_path, "x/a", "ppo", 10)
    make_run(tmp_path, "x/b", "ppo", 20, settings={"ppo.kl_coef": 0.2, "data.sources": [{"path": "other"}]})
    found = ask(tmp_path, "x/a,x/b")
    assert [row["id"] for row in found["runs"]] == ["x/a", "x/b"]
    assert found["differ"] == [
        {"option": "data.sources", "values": [[{"path": "demo/prompts", "split": "train", "weight": None}],
                                              [{"path": "other"}]]},
        {"option": "train.max_steps", "values": [10, 20]}, {"option": "ppo.kl_coef", "values": [0.1, 0.2]}]
    assert [each["prompt"].split("\n")[1] for each in found["prompts"]] == [f"{text}<|im_end|>" for text in PROMPTS]
    assert [[a["completion"] for a in each["answers"]] for each in found["prompts"]] == [
        ["After 10 steps: B", "After 20 steps: B"]] * 4
    metrics = {each["name"]: each for each in found["metrics"]}
    assert metrics["reward"] == {"name": "reward", "group": "reward",
                                 "meaning": "mean score of the responses, all sources weighed together"}
    assert "eval/reward" in metrics and metrics["time/train"]["group"] == "where a step's time goes"


def test_options_of_one_run_alone_are_no_difference():
    a, b = {"model": {"dtype": "x", "lora": {}}, "ppo": {"kl_coef": 0.1}, "output_dir": "a", "resume": "auto"}, \
        {"model": {"dtype": "y", "lora": {}}, "output_dir": "b", "resume": "never"}
    assert flat(a) == {"model.dtype": "x", "model.lora": {}, "ppo.kl_coef": 0.1, "output_dir": "a", "resume": "auto"}
    assert differing([flat(a), flat(b)]) == [{"option": "model.dtype", "values": ["x", "y"]}]
    assert differing([flat(a), flat(b), {"ppo.kl_coef": 0.3, "model.dtype": "x"}]) == [
        {"option": "model.dtype", "values": ["x", "y", "x"]}, {"option": "ppo.kl_coef", "values": [0.1, None, 0.3]}]


def test_a_prompt_that_most_runs_answer_comes_first():
    def said(prompt, completion, **more):
        return {"prompt": prompt, "completion": completion, **more}

    first, second = [said("p", "1"), said("q", "2")], [said("q", "3")]
    assert side_by_side([first, second, []]) == [{"prompt": "q", "answers": [first[1], second[0], None]},
                                                 {"prompt": "p", "answers": [first[0], None, None]}]
    pair = [said("p", "good", side="chosen"), said("p", "bad", side="rejected")]
    assert side_by_side([pair, pair]) == [{"prompt": "p", "answers": [pair[0]] * 2},
                                          {"prompt": "p", "answers": [pair[1]] * 2}]


def test_eight_runs_are_compared_and_nothing_that_is_no_run(tmp_path):
    for name in "abcdefgh":
        make_run(tmp_path, name, steps=1)
    assert len(ask(tmp_path, "a,b,c,d,e,f,g,h")["runs"]) == 8
    with pytest.raises(Refused):
        ask(tmp_path, "a,../b")


class Heard:
    def __init__(self):
        self.news = []

    def publish(self, name, data):
        self.news.append((name, data))

    def new(self):
        found, self.news = self.news, []
        return found


@pytest.fixture
def heard():
    return Heard()


def watching(outputs, heard):
    return Watcher(RunList(Studio(outputs), Histories()), heard)


def test_a_running_run_is_told_of_when_it_grows(tmp_path, heard):
    make_run(tmp_path, "old")
    run = make_run(tmp_path, "a", "ppo", 3, "running")
    watcher = watching(tmp_path, heard)
    watcher.look_at_all()
    watcher.look_at_running()
    assert heard.new() == []
    run.grow(2)
    watcher.look_at_running()
    assert heard.new() == [("run", {"id": "a", "step": 5})]
    watcher.look_at_running()
    assert heard.new() == []
    run.answer()
    watcher.look_at_all()
    assert heard.new() == [("run", {"id": "a", "step": 5})]
    run.finish()
    watcher.look_at_running()
    assert heard.new() == [("run", {"id": "a", "step": 5}), ("runs", {})]
    run.grow(1)
    watcher.look_at_running()
    assert heard.new() == []  # nobody is at it


def test_another_list_is_told_of(tmp_path, heard):
    watcher = watching(tmp_path, heard)
    watcher.look_at_all()
    assert heard.new() == []
    run = make_run(tmp_path, "a", "sft", 3, "running")
    watcher.look_at_all()
    assert heard.new() == [("runs", {})]
    run.grow(1)
    watcher.look_at_all()
    assert heard.new() == [("run", {"id": "a", "step": 4})]
    run.die()  # without a word
    watcher.look_at_all()
    assert heard.new() == [("runs", {})]
    shutil.rmtree(run.folder)
    watcher.look_at_all()
    assert heard.new() == [("runs", {})]
