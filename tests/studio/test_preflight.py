"""Who asks the processes that look, and what becomes of them: turns, time, memory, crashes, rest."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from hybrid_rlhf.studio.preflight import Look
from hybrid_rlhf.studio.studio import Refused
from tests.factories.pretended_look import START


@pytest.fixture
def make():
    made = []

    def make(**options) -> Look:
        made.append(Look(start=START, **options))
        return made[-1]

    yield make
    for look in made:
        look.close()


def is_gone(pid: int) -> bool:
    for _ in range(600):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_one_process_answers_all_of_a_kind_and_prints_nothing_into_its_answers(make):
    look = make()
    answers = [look.ask("data", {"say": "é\u2028", "print": True}), look.ask("plan", {"say": 2})]
    assert [a["say"] for a in answers] == ["é\u2028", 2] and len({a["pid"] for a in answers}) == 1
    assert look.ask("data", {"input": True}) == {"read": ""}  # nobody is there to be asked


def test_a_light_question_is_answered_while_a_heavy_one_takes_its_time(make):
    look = make()
    look.ask("settings", {"say": 0})  # its process has started
    with ThreadPoolExecutor(8) as pool:
        slow = pool.submit(look.ask, "preview", {"sleep": 5})
        time.sleep(0.3)
        assert look.ask("settings", {"say": 1})["say"] == 1 and not slow.done()
        assert slow.result()["kind"] == "preview"


def test_a_process_that_never_gets_ready_is_ended_too():
    look = Look(seconds=1.0, start="import time; time.sleep(60)")
    with pytest.raises(Refused, match="no answer within 1 seconds"):
        look.ask("data", {})
    look.close()


@pytest.mark.slow
def test_one_without_an_answer_in_time_is_ended_and_the_next_question_has_another(make):
    look = make(seconds=10.0)
    pid = look.ask("data", {})["pid"]
    begun = time.monotonic()
    with pytest.raises(Refused, match=r"no answer within 10 seconds; .*--preview") as found:
        look.ask("preview", {"sleep": 60})
    assert found.value.status == 504 and time.monotonic() - begun < 50 and is_gone(pid)
    assert look.ask("data", {"say": 1})["say"] == 1


def test_a_crash_is_one_line_and_the_next_question_has_another_process(make):
    look = make()
    for kind in ("data", "settings"):
        with pytest.raises(Refused, match=r"ended \(code -6\)") as found:
            look.ask(kind, {"crash": True})
        assert found.value.status == 503
        assert look.ask(kind, {"say": 1})["say"] == 1


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the system does not say what a process holds")
def test_one_that_takes_too_much_memory_is_ended(make):
    look = make(most_bytes=200 << 20)
    pid = look.ask("data", {"bytes": 50 << 20})["pid"]
    with pytest.raises(Refused, match=r"takes more than 0\.195312 GiB of memory"):
        look.ask("data", {"bytes": 300 << 20, "sleep": 30})
    assert is_gone(pid) and look.ask("data", {"say": 1})["say"] == 1


def test_one_that_is_not_needed_is_ended_and_so_is_all_at_the_end(make):
    look = make(idle=0.5)
    pid = look.ask("data", {})["pid"]
    assert is_gone(pid)
    second = look.ask("data", {})["pid"]
    assert second != pid
    with ThreadPoolExecutor(8) as pool:
        slow = pool.submit(look.ask, "preview", {"sleep": 60})
        waits = pool.submit(look.ask, "plan", {})
        time.sleep(0.3)
        look.close()
        for each in (slow, waits):
            with pytest.raises(Refused, match="the studio ends"):
                each.result(100)
    assert is_gone(second)
    with pytest.raises(Refused, match="the studio ends"):
        look.ask("data", {})


def test_it_ends_with_who_started_it(make):
    """A studio that is killed closes no process, but its pipe ends."""
    look = make()
    pid = look.ask("data", {})["pid"]
    look._children[False]._process.stdin.close()
    assert is_gone(pid)


def test_a_fault_is_told_without_its_traceback_and_said_in_the_log(make, caplog):
    with pytest.raises(Refused, match=r"an error of the studio \(ValueError\)") as found:
        make().ask("data", {"fault": "a secret \ud800"})
    assert found.value.status == 500 and "secret" not in str(found.value) and "a secret" in caplog.text
