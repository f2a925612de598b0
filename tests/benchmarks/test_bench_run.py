"""`make bench` goes on past what fails, keeps what was finished, ends what it started, and stays within its time."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import bench
import harness
import pytest
from peers import process

from tests.benchmarks.bench_place import entry, move_bench, row

OK = "import json, sys\njson.dump([{row!r}], open(sys.argv[sys.argv.index('--json') + 1], 'w'))\n"


@pytest.fixture
def places(tmp_path, monkeypatch):
    return move_bench(tmp_path, monkeypatch)


def script(places, name, text):
    (places / "benchmarks" / f"{name}.py").write_text(text)


def test_a_script_that_fails_is_named_and_the_next_one_runs(places, capfd):
    script(places, "memory", "raise SystemExit(3)\n")
    script(places, "startup", OK.format(row=row("warm")))
    assert bench.main(["--only", "memory", "startup"]) == 1
    assert "failed: memory ended with 3" in capfd.readouterr().out
    assert "startup warm |" in (places / "benchmarks.md").read_text()
    assert list(json.loads((places / "benchmarks.json").read_text())) == ["startup"]


def test_cases_that_a_stopped_script_had_finished_count_beside_the_earlier_others(places):
    before = entry(row("warm"), row("help", ours=9.0), command="python benchmarks/startup.py --old")
    (places / "benchmarks.json").write_text(json.dumps({"startup": before}))
    script(places, "startup", OK.format(row=row("warm", ours=2.0)) + "raise SystemExit(5)\n")
    assert bench.main(["--only", "startup"]) == 1
    found = json.loads((places / "benchmarks.json").read_text())["startup"]
    assert {r["case"]: r["ours"] for r in found["rows"]} == {"warm": 2.0, "help": 9.0}
    page = (places / "benchmarks.md").read_text()
    assert "startup.py --old; python benchmarks/startup.py --repeats 3`, ended with 5" in page


def test_at_its_limit_a_script_ends_with_all_that_it_started(places):
    mark = places / "pid"
    grandchild = f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)"
    script(places, "memory", f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {grandchild!r}])\n")
    assert bench.within([sys.executable, str(places / "benchmarks/memory.py")], 2) == "stopped after 2 s"
    if mark.exists():  # it may not have come so far on a busy machine
        status = Path(f"/proc/{mark.read_text()}/status")
        for _ in range(100):
            if not status.exists() or "State:\tZ" in status.read_text():
                break
            time.sleep(0.05)
        else:
            pytest.fail("a process that the script had started is still alive")


def test_no_script_is_begun_when_the_time_is_over(places, monkeypatch, capfd):
    monkeypatch.setattr(bench, "BUDGET", bench.LEAST - 1)
    script(places, "memory", OK.format(row=row("ppo")))
    assert bench.main(["--only", "memory"]) == 1
    assert "failed: memory no time left" in capfd.readouterr().out


def test_a_script_whose_peer_is_missing_is_left_out_with_a_line(places, monkeypatch, capfd):
    monkeypatch.setattr(bench, "python_for", lambda package: None)
    script(places, "memory", OK.format(row=row("ppo")))
    assert bench.main(["--only", "sft_step", "memory"]) == 0
    assert "sft_step: left out, its peer trl is not installed (make bench-peers)" in capfd.readouterr().out
    assert "memory ppo |" in (places / "benchmarks.md").read_text()


def test_a_quick_try_writes_no_record(places):
    script(places, "memory", OK.format(row=row("ppo")))
    assert bench.main(["--quick", "--only", "memory"]) == 0
    assert not (places / "benchmarks.json").exists()
    assert "memory ppo |" in (places / "outputs/bench-quick/benchmarks.md").read_text()


def test_a_peer_in_its_own_process_takes_a_step_when_told(tmp_path, monkeypatch):
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers/counter.py").write_text(
        "class Counter:\n    def __init__(self, path):\n        self.path = path\n        print('noise')\n"
        "    def step(self):\n        print('more')\n        open(self.path, 'a').write('x')\n")
    monkeypatch.setattr(process, "BENCHMARKS", tmp_path)
    file = tmp_path / "steps"
    with process.PeerProcess(sys.executable, "counter:Counter", {"path": str(file)}, 1) as peer:
        assert not file.exists()
        peer.step()
        assert file.read_text() == "x"
        peer.step()
        assert file.read_text() == "xx"
        assert peer.peak > 10**7 and 0 <= peer.seconds < 60
        assert set(peer.versions) == {"torch", "transformers"}


def test_a_peer_that_dies_ends_the_benchmark(tmp_path, monkeypatch):
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers/dying.py").write_text("class Dying:\n    def step(self):\n        raise SystemExit(7)\n")
    monkeypatch.setattr(process, "BENCHMARKS", tmp_path)
    with (process.PeerProcess(sys.executable, "dying:Dying", {}, 1) as peer,
          pytest.raises(SystemExit, match="dying:Dying: the peer's process ended with 7")):
        peer.step()


def test_the_peers_own_environment_comes_first(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_RLHF_CACHE", str(tmp_path))
    assert process.python_for("torch") == sys.executable
    assert process.python_for("no_such_package_here") is None
    (tmp_path / "peers/bin").mkdir(parents=True)
    (tmp_path / "peers/bin/python").touch()
    package = tmp_path / "peers/lib/python3.11/site-packages/trl"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    assert process.python_for("trl") == str(tmp_path / "peers/bin/python")
    assert process.python_for("torch") == sys.executable


def test_a_forked_function_answers_or_the_fault_is_named():
    assert harness.run_forked(max, 3, 4, limit=20) == (4, "")
    assert harness.run_forked(int, "x", limit=20)[1].startswith("ValueError: invalid literal")
    assert harness.run_forked(os._exit, 3, limit=20) == (None, "the process ended with code 3")
    assert harness.run_forked(time.sleep, 20, limit=0.2) == (None, "no answer within 0.2 s")
