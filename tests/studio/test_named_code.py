"""What came with somebody else's folder runs nothing unasked."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import yaml

from hybrid_rlhf.studio.named_code import module_code, named_code
from tests.factories.studio_jobs import queue_client, use_quick_launcher


@pytest.mark.parametrize("settings, named", [
    ({"reward": {"functions": ["builtin:format", "builtin:numeric_match"]},
      "environment": {"tools": ["builtin:calculator"]}}, []),
    ({"reward": {"functions": ["builtin:format", "/x/f.py:s"]}}, ["reward.functions /x/f.py:s"]),
    ({"reward": {"functions": "f.py:s"}}, ["reward.functions f.py:s"]),
    ({"reward.functions": ["f.py:s"]}, ["reward.functions f.py:s"]),
    ({"environment": {"factory": {"game": "g.py:Game"}}}, ["environment.factory.game g.py:Game"]),
    ({"environment": {"tools": ["t.py:search"]}}, ["environment.tools t.py:search"]),
    ({"reward": {"judge": {"url": "http://x", "model": None}, "url": "http://y"}},
     ["reward.judge.url http://x", "reward.url http://y"]),
    ({"roles": {"reward": {}}, "model": {"trust_remote_code": True, "trust_pickled_weights": False}},
     ["model.trust_remote_code"]),
    (None, []), ([1], []), ("text", [])])
def test_code_addresses_and_permissions_are_named(settings, named):
    assert named_code(settings) == named


def a_strangers_run(outputs):
    folder = outputs / "theirs"
    folder.mkdir(parents=True)
    settings = {"stage": "sft", "reward": {"functions": ["/x/evil.py:score"]}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "run.json").write_text('{"stage": "sft", "status": "stopped", "config": {}, "metrics": {}, "facts": {}}')
    return folder


def test_a_strangers_run_is_resumed_after_a_word_of_confirmation_only(monkeypatch, tmp_path):
    use_quick_launcher(monkeypatch, tmp_path)
    a_strangers_run(tmp_path / "outputs")
    with queue_client(tmp_path / "outputs", is_open=False) as client:
        answer = client.post("/api/run/resume", json={"id": "theirs"})
        assert (answer.status_code, answer.json()["option"]) == (409, "is_confirmed")
        assert "/x/evil.py:score" in answer.json()["error"]
        assert client.get("/api/jobs").json()["jobs"] == []
        assert client.post("/api/run/resume", json={"id": "theirs", "is_confirmed": "yes"}).status_code == 409
        assert client.post("/api/run/resume", json={"id": "theirs", "is_confirmed": True}).status_code == 200


def test_a_forged_job_does_not_say_where_a_run_is_started(monkeypatch, tmp_path):
    use_quick_launcher(monkeypatch, tmp_path)
    outputs = tmp_path / "outputs"
    a_strangers_run(outputs)
    with queue_client(outputs, is_open=False) as client:
        made = client.post("/api/run/resume", json={"id": "theirs", "is_confirmed": True}).json()
        folder = outputs / ".studio/jobs" / made["id"]
        facts = folder / "job.json"
        facts.write_text(facts.read_text().replace('"folder": "', '"folder": "/tmp/evil'))
        (folder / "end.json").write_text('{"rc": 1, "finished": "2026-01-01T00:00:00+00:00"}')
    with queue_client(outputs, is_open=False) as client:  # a studio that has not seen the true one
        again = client.post("/api/run/resume", json={"id": "theirs"})
        assert again.status_code == 409  # nor does it count as one's own


def test_a_module_in_the_current_folder_is_not_taken_for_the_library(tmp_path):
    (tmp_path / "hybrid_rlhf").mkdir()
    (tmp_path / "hybrid_rlhf" / "__init__.py").write_text("raise SystemExit('stranger')")
    (tmp_path / "hybrid_rlhf" / "__main__.py").write_text("")
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    found = subprocess.run([sys.executable, "-c", module_code("hybrid_rlhf.__main__", "launch"), "--version"],
                           cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True)
    assert found.returncode == 0 and "stranger" not in found.stdout + found.stderr
