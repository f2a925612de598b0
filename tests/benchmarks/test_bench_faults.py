"""A try that is not survived is seen as such, whatever became of it; and the page shows it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import harness
import pytest
from fault_tries import attempt
from fault_tries.attempt import Broken, Try
from fault_tries.product import Ended, done_or_refused, finished, refused


def survives(place: Path) -> None:
    assert place.name == "place" and not os.listdir()
    os.write(1, b"its words\n")  # pytest has taken sys.stdout


def refuses(_place: Path) -> None:
    raise Broken("exit code 3,\nnot 2")


def fails(_place: Path) -> None:
    raise KeyError("own")


def dies(_place: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(_place: Path) -> None:
    time.sleep(20)


def leaves(_place: Path) -> None:
    if not os.fork():
        os.setsid()
        time.sleep(60)


FAULTS = {survives: "", refuses: "exit code 3, not 2", fails: "the try itself failed: KeyError: 'own'",
          dies: "its process has died", hangs: "not over after 1 s", leaves: "left running: "}


def test_each_way_not_to_survive_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(attempt, "_LEAVE_SECONDS", 0.2)
    (tmp_path / "place").mkdir()
    tries = [Try(act.__name__, act, 1.0 if act is hangs else 60.0) for act in FAULTS]
    answers = {each.name: answer for each, answer in attempt.outcomes(tries, tmp_path / "place", tmp_path, 2)}
    for act, fault in FAULTS.items():
        reported = answers[act.__name__]["fault"]
        assert fault in reported if fault else not reported, (act.__name__, reported)
    assert answers["survives"]["log"] == "its words\n"


ONE_LINE = Ended(2, "", "warning: x\nerror: no model; give one\n")


@pytest.mark.parametrize(("ended", "judge", "said"), [
    (ONE_LINE, refused, None), (ONE_LINE, done_or_refused, None), (Ended(0, "", ""), finished, None),
    (Ended(0, "", ""), refused, "exit code 0, not 2"), (ONE_LINE, finished, "exit code 2, not 0"),
    (Ended(2, "", "error: a\nerror: b\n"), refused, "2 lines of error"), (Ended(2, "", "no\n"), refused, "0 lines"),
    (Ended(-9, "", ""), done_or_refused, "exit code -9"), (Ended(0, "", "error: x"), finished, "exit code 0 with"),
    (Ended(2, "", f"error: {'x' * 2000}\n"), refused, "an error of 2007 characters"),
    (Ended(2, "", "Traceback (most recent call last):\nKeyError: 1\nerror: x\n"), refused, "a traceback: error: x"),
    (ONE_LINE, lambda ended: refused(ended, "tokenizer"), "does not say 'tokenizer'")], ids=range(12))
def test_what_a_command_answers_is_judged(ended, judge, said):
    if said is None:
        judge(ended)
        return
    with pytest.raises(Broken, match=said):
        judge(ended)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_first_try_of_each_case_is_made_and_shown(tmp_path):
    done = subprocess.run([sys.executable, "benchmarks/faults.py", "--quick", "--patience", "4", "--json",
                           str(tmp_path / "rows.json"), "--page", str(tmp_path / "faults.md")], cwd=harness.ROOT)
    rows = json.loads((tmp_path / "rows.json").read_text())
    text = (tmp_path / "faults.md").read_text()
    assert len(rows) == 8 and all(row["tried"] == 1 for row in rows)
    failed = [each for row in rows for each in row["failed"]]
    assert not failed and done.returncode == 0 and "**8 of 8 tries were survived**" in text
