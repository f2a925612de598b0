"""A process that watches for the others' failure ends with its own exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hybrid_rlhf.core import distributed, failure
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from tests.factories.processes import ROOT, free_port

CHILDREN = """
import json, os, sys, time
import torch.distributed as dist
from hybrid_rlhf.core import distributed, failure

failure._POLL_SECONDS, codes = 0.0001, []
failure.world_size = lambda: 2  # the other one is not needed: nothing is sent to it
for _ in range(8):
    if number := os.fork():
        codes.append(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))
        continue
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
    failure.join()
    time.sleep(0.05)
    sys.exit(3)
print(json.dumps(codes))
"""


@pytest.mark.slow
def test_the_watching_thread_does_not_abort_a_process_that_ends():
    """Without waiting for the thread about every second one was aborted: exit code -6 after a run that succeeded."""
    done = subprocess.run([sys.executable, "-c", CHILDREN, free_port()], capture_output=True, text=True, cwd=ROOT,
                          timeout=280, check=False)
    assert json.loads(done.stdout) == [3] * 8, done.stderr[-2000:]


@pytest.fixture
def sleeping(monkeypatch):
    """This process's view of three others of a world of four, and the first of them: two of this host, one of another.
    """
    monkeypatch.setattr(failure, "world_size", lambda: 4)
    store, started = dist.HashStore(), [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    for number, process in enumerate(started, 1):
        told = [failure._host(), process.pid, failure._began(process.pid)]
        store.set(f"process/{number}", json.dumps(told))
    store.set("process/3", json.dumps(["elsewhere", 1, "0"]))
    seen = failure.Peers(store)
    seen.meet()
    yield seen, started, store
    for process in started:
        process.kill(), process.wait()


def test_a_process_that_dies_without_leaving_is_dead(sleeping):
    seen, (first, second), store = sleeping
    assert seen.dead() == []
    first.kill()
    second.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # not waited for by its parent: a zombie is dead too
    second.wait()
    assert seen.dead() == [1, 2]
    store.set("left/2", "")
    assert seen.dead() == [1]


def test_a_number_that_another_process_has_now_is_not_the_one_that_died(sleeping):
    seen, (first, _), _ = sleeping
    seen._processes[1] = first.pid, "12345"
    assert seen.dead() == [1]


def test_an_error_of_a_collective_names_the_process_it_comes_from(sleeping, monkeypatch):
    seen, (first, _), store = sleeping
    monkeypatch.setattr(failure, "_peers", seen), monkeypatch.setattr(failure, "_store", store)
    monkeypatch.setattr(failure, "_SEARCH_SECONDS", 0.1)
    closed = RuntimeError("Connection closed")
    assert failure.lost_process(closed) is None and failure.lost_process(ValueError("a fault of ours")) is None
    first.kill(), first.wait()
    assert failure.lost_process(closed).startswith("error: process 1 has died")
    store.set(failure._KEY, json.dumps({"message": "error: no such file", "code": 2, "is_lost": False}))
    assert failure.lost_process(closed) == "error: no such file"


def test_the_first_of_the_living_is_the_main_process_when_that_has_died(monkeypatch):
    monkeypatch.setattr("hybrid_rlhf.core.distributed._main", 0)
    monkeypatch.setattr(failure, "world_size", lambda: 4)
    monkeypatch.setattr("hybrid_rlhf.core.distributed.rank", lambda: 2)
    for own, dead, is_main in ((2, [0], False), (2, [1], False), (2, [0, 1], True)):
        monkeypatch.setattr(failure, "rank", lambda own=own: own)
        assert f"process {dead[0]} has died" in failure._death(dead)
        assert failure.is_main() is is_main


def test_only_a_known_launcher_s_end_is_one(monkeypatch):
    """A shell that started a process of several may leave before it: nohup, setsid."""
    for name in ("TORCHELASTIC_RUN_ID", "CROSS_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    plain = failure.Launcher()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    launched = failure.Launcher()
    assert not launched.has_died()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert launched.has_died() and not plain.has_died() and not plain.holds_store


def test_a_process_of_which_nothing_is_heard_for_ten_minutes_is_silent_until_it_is_heard_of_or_leaves(monkeypatch):
    """One on another host, which cannot be looked up. Each counts by its own clock; a first sign must have come."""
    now, store = [1000.0], dist.HashStore()
    monkeypatch.setattr(failure, "world_size", lambda: 3)
    monkeypatch.setattr(failure.time, "monotonic", lambda: now[0])
    views = []
    for number in range(3):
        monkeypatch.setattr(failure, "rank", lambda number=number: number)
        views.append(failure.Peers(store))

    def look(number: int, after: float, beside: tuple[int, ...] = ()) -> list[int]:
        """What process `number` sees after so many seconds, in which it looks every ten, as those beside it do."""
        found: list[int] = []
        for seconds in [10] * int(after // 10) + [after % 10] * (after % 10 > 0 or after == 0):
            now[0] += seconds
            for each in (*beside, number):
                monkeypatch.setattr(failure, "rank", lambda each=each: each)
                found = views[each].silent()
        return found

    assert (look(0, 0), look(1, 1)) == ([], [])  # process 2 loads for an hour and has said nothing yet
    assert (look(0, 3600, (1,)), look(1, 1)) == ([], [])
    assert (look(2, 1), look(0, 10), look(1, 1)) == ([], [], [])
    assert (look(0, 590, (1,)), look(0, 5, (1,)), look(0, 10, (1,))) == ([], [], [2])
    assert (look(2, 1), look(0, 10)) == ([], [])  # it was stopped, and goes on
    now[0] += 700  # all of them were stopped: the first to go on has not listened itself
    assert (look(0, 0), look(0, 20)) == ([], [])
    assert (look(1, 0), look(2, 0)) == ([], [])
    store.set("left/2", "")
    assert (look(0, 590), look(0, 30), look(1, 11), look(0, 11)) == ([], [1], [], [])


class Ended(BaseException):
    """Stands for the end of the process."""


def test_a_silent_process_ends_the_others(monkeypatch):
    store, codes, told = dist.HashStore(), [], []

    def end(code):
        codes.append(code)
        raise Ended

    monkeypatch.setattr(failure.os, "_exit", end), monkeypatch.setattr(failure, "_callbacks", [told.append])
    monkeypatch.setattr(failure, "_ending", threading.Lock())
    seen = SimpleNamespace(meet=lambda: None, dead=list, silent=lambda: [1])
    with pytest.raises(Ended):
        failure._watch(store, seen, SimpleNamespace(has_died=lambda: False, holds_store=False))
    assert codes == [1] and json.loads(store.get(failure._KEY))["is_lost"]
    assert told == ["error: process 1 gives no sign of life (stopped, or its host is gone); the same command goes on "
                    "from the last checkpoint"]


# -- processes wait hours for each other in every group ---------------------------------------------------------------


def patience(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


@pytest.fixture
def joining(monkeypatch):
    """The group is asked for as a launcher's process does, in a world of one."""
    asked = []
    monkeypatch.setenv("RANK", "0"), monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **named: asked.append((given, named)))
    return asked


def test_a_launched_process_joins_with_a_patience_of_hours(joining, monkeypatch):
    distributed.init_process_group()
    ((backend,), named), = joining
    assert backend in ("gloo", "nccl") and named == {"timeout": distributed.PATIENCE}
    assert timedelta(hours=6) <= distributed.PATIENCE


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default group is NCCL's, without a backend for the CPU")
@pytest.mark.parametrize("stage", [0, 2])
def test_the_groups_made_later_have_it_too(stage):
    HybridEngine(torch.nn.Linear(3, 1)).prepare_training(OptimizerConfig(), lambda _step: 1.0, ZeroConfig(stage))
    from deepspeed.utils import groups

    assert patience(groups._WORLD_GROUP) == distributed.PATIENCE
    assert patience(groups._get_data_parallel_group()) == distributed.PATIENCE
    assert patience(distributed.consecutive_ranks(1).group) == distributed.PATIENCE
