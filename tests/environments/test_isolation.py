"""environment.isolate: the same answers from other processes, and one line for whatever becomes of these."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.environments.calls import CallPool, shown
from hybrid_rlhf.environments.isolated import open_isolated
from hybrid_rlhf.environments.open import EnvironmentConfig, open_environments
from hybrid_rlhf.rewards.functions import handed_over
from tests.factories.crashing_environment import FILE


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(FILE)
    return str(file)


def settings(factory=None, tools=(), **more) -> EnvironmentConfig:
    given = {"num_workers": 2, "timeout": 2.0, "isolate": True} | more
    return EnvironmentConfig(factory=factory, tools=list(tools), **given)


def given(path: str, **more) -> EnvironmentConfig:
    return settings({"count": f"{path}:Count", "game": f"{path}:Game"}, [f"{path}:end", "builtin:calculator"],
                    options={"count": {"step": 2}}, **more)


@pytest.fixture(scope="module")
def kinds(path):
    """Opened once, as that takes seconds: each test gets the processes as the one before has left them."""
    return {kind.name: kind for kind in open_isolated(given(path)).kinds}


@pytest.fixture(scope="module")
def kinds_here(path):
    own = given(path, isolate=False)
    return {kind.name: kind for kind in open_environments(own.factory, own.tool_list, own.options).kinds}


@pytest.fixture
def pool():
    made = CallPool(2, 2.0)
    yield made
    made.close()


def outcomes(pool: CallPool, instance, *calls) -> list:
    """What becomes of the calls, started together."""
    for number, call in enumerate(calls):
        pool.start(number, call, lane=instance.lane)
    found = {}
    while pool.num_waiting:
        found |= dict(pool.finished(wait=True))
    return [found[number] for number in range(len(calls))]


def begun(pool: CallPool, kind, **row):
    instance = kind.new()
    (outcome,) = outcomes(pool, instance, partial(instance.reset, row))
    assert outcome.error is None
    return instance


def asked(pool: CallPool, instance, name: str, **given):
    outcome = outcomes(pool, instance, partial(instance.call, name, given))[0]
    return outcome._replace(value=None if outcome.value is None else str(outcome.value))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_kinds_are_those_of_this_process(kinds, kinds_here):
    for name, here in kinds_here.items():
        apart = kinds[name]
        assert apart.schemas == here.schemas and apart.tool_names == here.tool_names
        assert (apart.has_step, apart.has_reward, apart.needed) == (here.has_step, here.has_reward, here.needed)
    assert kinds["count"].tools["calculator"] is kinds_here["count"].tools["calculator"]  # what is built in stays


def test_answers_are_those_of_the_same_class_in_this_process(kinds, kinds_here, pool):
    calls = [("add", {"times": 3}), ("add", {"times": 1}), ("wait", {"seconds": 0.01}), ("add", {}), ("add", [1]),
             ("add", {"times": 1, "more": 2}), ("ad", {}), ("add", {"times": "x"}), ("fail", {"what": "type"}),
             ("fail", {"what": "value"}), ("calculator", {"expression": "2*3"}),
             *(("odd", {"what": w}) for w in ("bytes", "set", "array", "long", "none", "tuple", "control", "surrogate",
                                              "keys", "class", "tagged"))]
    found = []
    for kind in (kinds["count"], kinds_here["count"]):
        own = kind.new()
        row = {"start": 5, "answer": [1, {"a": None}]}
        found.append([*outcomes(pool, own, partial(own.reset, row), partial(own.reset, row)), own.environment.name])
        for name, arguments in calls:
            pool.start(0, partial(own.call, name, arguments), partial(shown, max_chars=4000), own.lane)
            found[-1] += [outcome for _, outcome in pool.finished(wait=True)]
        found[-1] += outcomes(pool, own, own.reward)
    apart, here = found
    assert apart == here
    assert apart[0].value == "['answer'] 1" and apart[1].value == "['answer'] 2"  # constructed once, reset often
    assert (apart[3].value, apart[4].value) == ("11", "13") and apart[-1].value == 13.0  # 5 + 2*3, + 2*1
    assert apart[6].error.startswith("add: missing a required argument") and "its parameters are" in apart[10].error
    assert apart[11].error.startswith("fail raised TypeError: a reason (own.py line ")


def test_steps_are_those_of_the_same_class_in_this_process(kinds, kinds_here, pool):
    messages = [{"role": "user", "content": "go"}]
    found = []
    for kind in (kinds["game"], kinds_here["game"]):
        own = begun(pool, kind)
        found.append(outcomes(pool, own, *(partial(own.step, [*messages, {"role": "assistant", "content": what}])
                                           for what in ("go", "words", "tagged", "none", "nan", "unknown"))))
    assert found[0] == found[1] and messages == [{"role": "user", "content": "go"}]
    assert found[0][0].value == ([{"role": "tool", "name": "a", "content": "é"}], False, 0.5)
    assert found[0][1].value[2] == 0.5 and found[0][2].value[0][0]["__type__"] == 3
    assert found[0][4].error == "step answered the reward nan, where a finite number or None is needed"


@pytest.mark.parametrize(("how", "says"), [
    ("exit", "end ended its process (exit code 7)"), ("segfault", "end ended its process (SIGSEGV)")])
def test_a_tool_that_ends_its_process_is_an_error_and_the_next_call_has_a_new_one(kinds, pool, how, says):
    own = kinds["count"].new()
    assert asked(pool, own, "end", how=how)[1:] == (says, False)
    said, pid = asked(pool, own, "end", how="well").value.split()
    assert said == "well" and int(pid) != os.getpid()


def test_a_tool_that_hangs_in_compiled_code_is_late_and_its_process_ended(kinds, pool):
    own = kinds["count"].new()
    pid = int(asked(pool, own, "end", how="well").value.split()[1])
    began = time.monotonic()
    assert asked(pool, own, "end", how="regex")[1:] == (
        "no answer within 2 s (environment.timeout); its process was ended", True)
    assert 1.9 < time.monotonic() - began < 20 and not is_alive(pid)
    assert asked(pool, own, "end", how="well").error is None


def test_a_tool_that_takes_all_memory_fails_alone(kinds, pool):
    own = kinds["count"].new()
    assert asked(pool, own, "end", how="memory").error.startswith("end raised MemoryError")
    assert asked(pool, own, "end", how="kill").error is not None  # the bound stays with the process


def test_what_a_tool_has_started_ends_with_its_process(kinds, pool, path):
    own = kinds["count"].new()
    assert asked(pool, own, "end", how="child").error is None
    child = int(Path(path).with_name("child").read_text())
    assert is_alive(child)
    asked(pool, own, "end", how="exit")
    wait_for(lambda: not is_alive(child))


def test_an_episode_whose_environment_is_gone_goes_on_with_errors_until_the_next_reset(kinds, pool):
    first, second = begun(pool, kinds["count"]), begun(pool, kinds["count"])
    third = begun(pool, kinds["count"])  # with the first one: there are two processes
    places = [asked(pool, own, "where").value for own in (first, second, third)]
    assert places[0] == places[2] != places[1]
    assert asked(pool, first, "crash", how="segfault").error == "crash ended its process (SIGSEGV)"
    gone = "was not called: the environment is gone: an earlier call ended its process (SIGSEGV)"
    assert asked(pool, first, "add", times=1)[1:] == (f"add {gone}", False)
    assert outcomes(pool, third, third.reward)[0].error == f"get_reward {gone}"
    assert asked(pool, second, "add", times=1).value == "2" and asked(pool, first, "end", how="well").error is None
    row = {"start": 3}
    assert outcomes(pool, first, partial(first.reset, row))[0].value == "[] 1"  # constructed again
    assert asked(pool, first, "add", times=1).value == "5"
    assert asked(pool, third, "add", times=1).error == f"add {gone}"  # its process is another one now
    assert outcomes(pool, third, partial(third.reset, row))[0].error is None
    assert asked(pool, third, "add", times=2).value == "7" and asked(pool, first, "add", times=1).value == "7"


@pytest.mark.slow
def test_with_no_workers_calls_follow_one_another_in_one_process(path):
    (count, _) = open_isolated(given(path, num_workers=0)).kinds
    pool = CallPool(0, 2.0)
    first, second = begun(pool, count), begun(pool, count)
    assert asked(pool, first, "where").value == asked(pool, second, "where").value
    assert asked(pool, first, "crash", how="regex")[1:] == ("no answer within 2 s (environment.timeout)", True)
    assert asked(pool, second, "add", times=1).error == (
        "add was not called: the environment is gone: it was ended with an earlier call, whose time was up")
    assert outcomes(pool, second, partial(second.reset, {}))[0].error is None
    assert asked(pool, second, "add", times=1).value == "2"
    pid = int(asked(pool, second, "where").value)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        asked(pool, second, "wait", seconds=1.5)
    assert not is_alive(pid)  # nobody may take the answer for that to the next request
    assert outcomes(pool, second, partial(second.reset, {}))[0].error is None
    assert asked(CallPool(0, 0.2), second, "wait", seconds=1.5).is_late  # by the pool's clock, before the process's
    assert "whose time was up" in asked(pool, second, "add", times=1).error


@pytest.mark.parametrize(("factory", "tools", "options", "says"), [
    ("{}:Crashes", [], {}, r"cannot be opened: it ended its process \(exit code 9\); fix the file"),
    (None, ["python:here@12"], {}, "here is not a function or class that another process can import; put it"),
    (None, ["python:gone@12"], {}, "gone was given from Python, and nothing gives it here")])
def test_what_cannot_be_opened_is_one_line_at_the_start(path, factory, tools, options, says):
    def here() -> str:
        """Here."""
        return ""

    with handed_over({"here": here}), pytest.raises(UserError, match=says) as refused:
        open_isolated(settings(factory and factory.format(path), tools, options=options))
    assert "\n" not in str(refused.value)


def test_what_is_built_in_stays_and_starts_no_process(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    (kind,) = open_isolated(settings("builtin:guess_number_tool", ["builtin:calculator"])).kinds
    assert kind.new().lane is None


RUN = """
import os, sys, time
from functools import partial
from hybrid_rlhf.environments.calls import CallPool
from hybrid_rlhf.environments.isolated import open_isolated
from hybrid_rlhf.environments.open import EnvironmentConfig
path = sys.argv[1]
if __name__ == "__main__":
    (kind,) = open_isolated(EnvironmentConfig(factory=f"{path}:Count", timeout=8, num_workers=2, isolate=True)).kinds
    pool, own, other = CallPool(2, 300), kind.new(), kind.new()
    pool.start(0, partial(own.reset, {}), lane=own.lane)
    pool.start(1, partial(other.reset, {}), lane=other.lane)
    while pool.num_waiting:
        pool.finished(wait=True)
    pool.start(0, partial(own.call, "where", {}), lane=own.lane)
    pids = [outcome.value for _, outcome in pool.finished(wait=True)]
    pool.start(0, partial(other.call, "where", {}), lane=other.lane)
    pids += [outcome.value for _, outcome in pool.finished(wait=True)]
    pool.start(0, partial(own.call, "crash", {"how": "regex"}), lane=own.lane)
    pool.start(1, partial(other.call, "wait", {"seconds": 100}), lane=other.lane)
    time.sleep(0.3)
    print(*pids, flush=True)
    time.sleep(100)
"""


@pytest.mark.slow
def test_the_end_of_a_run_that_is_killed_leaves_no_process(path, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(RUN)
    run = subprocess.Popen([sys.executable, str(script), path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                           env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])})
    pids = [int(pid) for pid in run.stdout.readline().split()]
    assert len(set(pids)) == 2 and all(map(is_alive, pids))
    run.kill()
    run.wait(120)
    run.stdout.close()
    wait_for(lambda: not is_alive(pids[1]))  # Python's code ends with the run; compiled code at its timeout
    wait_for(lambda: not is_alive(pids[0]))
