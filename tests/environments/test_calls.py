"""Whatever a call does, it becomes one outcome within its time, and the calls beside it go on."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import signal
import threading
import time
from contextlib import closing
from functools import partial

import numpy as np
import pytest
import torch

from hybrid_rlhf.environments.calls import CallError, CallPool, shown

LATE = (None, "no answer within 0.3 s (environment.timeout)", True)


@pytest.fixture(params=[0, 2], ids=["here", "beside"])
def pool(request):
    made = CallPool(request.param, 0.3)
    yield made
    made.close()


@pytest.fixture
def beside():
    made = CallPool(2, 0.3)
    yield made
    made.close()


def outcome(pool: CallPool, call, then=None):
    pool.start("key", call, then)
    ((key, found),) = pool.finished(wait=True)
    assert key == "key" and pool.num_waiting == 0
    return found


_OTHERS: set = set()


def num_threads() -> int:
    """Of the pools of this test: those of others may still end."""
    return sum(t.name.startswith("environment") and t.ident not in _OTHERS for t in threading.enumerate())


@pytest.fixture(autouse=True)
def others():
    _OTHERS.clear()
    _OTHERS.update(t.ident for t in threading.enumerate())


def wait_for(condition, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def raising(error):
    raise error


async def later(value, seconds: float = 0.01):
    await asyncio.sleep(seconds)
    return raising(value) if isinstance(value, BaseException) else value


def test_a_value_now_or_later_is_the_outcome(pool):
    assert outcome(pool, lambda: 3) == (3, None, False)
    assert outcome(pool, lambda: later(4)) == (4, None, False)
    assert outcome(pool, lambda: later(4), then=lambda v: v + 1) == (5, None, False)
    assert outcome(pool, lambda: 4, then=lambda v: v + 1) == (5, None, False)
    assert pool.finished(wait=True) == [] == pool.finished(wait=False)


@pytest.mark.parametrize("make", [raising, later], ids=["now", "later"])
@pytest.mark.parametrize(("error", "says"), [
    (KeyError("a"), "raised KeyError: 'a'"), (SystemExit(3), "raised SystemExit: 3"),
    (CallError("in words"), "in words"), (asyncio.CancelledError(), "raised CancelledError:"),
    (ValueError("two\nlines \x1b[2J \ud800"), "raised ValueError: two lines ␛[2J \ufffd")])
def test_what_is_raised_is_one_line(pool, make, error, says):
    assert outcome(pool, lambda: make(error)) == (None, says, False)
    assert outcome(pool, lambda: 1).value == 1


def test_keyboard_interrupt_of_a_tool_beside_is_an_error_and_the_users_is_his(beside):
    for make in (raising, later):
        assert outcome(beside, lambda make=make: make(KeyboardInterrupt())).error == "raised KeyboardInterrupt:"
    here = CallPool(0, 20)
    interrupt = partial(threading.Timer, 0.5, os.kill, (os.getpid(), signal.SIGINT))

    def hold() -> None:
        interrupt().start()  # in the call, so that it comes to nobody else on a busy machine
        time.sleep(10)

    async def hold_later() -> None:
        interrupt().start()
        await asyncio.sleep(10)

    for call in (hold, hold_later):
        with pytest.raises(KeyboardInterrupt):
            here.start("key", call)
    with closing(here), closing(CallPool(2, 20)) as patient:
        patient.start("key", lambda: (interrupt().start(), time.sleep(2)))
        with pytest.raises(KeyboardInterrupt):
            patient.finished(wait=True)


@pytest.mark.parametrize("call", [
    lambda: time.sleep(0.6), lambda: [0 for _ in itertools.count()], lambda: later(1, 100),
    lambda: asyncio.sleep(0.4)], ids=["sleeps", "loops", "waits", "is a bit late"])
def test_what_hangs_is_late_and_the_next_call_is_made(pool, call):
    began = time.monotonic()
    assert outcome(pool, call) == LATE
    assert time.monotonic() - began < 15
    assert [outcome(pool, lambda: 1).value, outcome(pool, lambda: later(2)).value] == [1, 2]


async def blocking(seconds: float):
    time.sleep(seconds)


def test_a_coroutine_that_blocks_its_loop_holds_up_no_later_one(pool):
    assert outcome(pool, lambda: blocking(8)) == LATE
    began = time.monotonic()
    assert [outcome(pool, lambda: later(2)).value for _ in range(2)] == [2, 2]
    assert time.monotonic() - began < 6


def test_calls_go_on_beside_those_that_hang_and_threads_stay_few(beside):
    go_on = threading.Event()
    for i in range(4):  # twice as many as there are workers
        beside.start(f"hangs {i}", lambda: go_on.wait(20))
    for i in range(4):
        beside.start(i, lambda i=i: i)
    found = {}
    began = time.monotonic()
    while beside.num_waiting:
        found |= dict(beside.finished(wait=True))
        assert num_threads() <= 2 + 4 + 1
    assert {k: o.value for k, o in found.items() if not o.is_late} == {0: 0, 1: 1, 2: 2, 3: 3}
    assert [k for k, o in found.items() if o.is_late] == [f"hangs {i}" for i in range(4)]
    assert 0.6 < time.monotonic() - began < 15  # a call's time begins when it does
    go_on.set()
    wait_for(lambda: num_threads() <= 3)


def test_coroutines_wait_beside_each_other_without_workers(beside):
    began = time.monotonic()
    for i in range(50):
        beside.start(i, lambda i=i: later(i, 0.1))
    found = []
    while beside.num_waiting:
        found += beside.finished(wait=True)
    assert sorted(o.value for _, o in found) == list(range(50))
    assert time.monotonic() - began < 3 and num_threads() <= 3


def test_finished_does_not_wait_where_it_is_not_asked_to():
    go_on = threading.Event()
    patient = CallPool(2, 60)
    patient.start("a", lambda: go_on.wait(60))
    assert patient.finished(wait=False) == [] and patient.num_waiting == 1
    go_on.set()
    wait_for(lambda: bool(patient.finished(wait=False)))
    patient.close()


def test_the_first_to_end_is_the_first_that_is_told():
    go_on = threading.Event()
    patient = CallPool(2, 60)
    patient.start("begun first", lambda: go_on.wait(60))
    patient.start("ended first", lambda: None)
    assert [k for k, _ in patient.finished(wait=True)] == ["ended first"]
    go_on.set()
    assert [k for k, _ in patient.finished(wait=True)] == ["begun first"]
    patient.close()


def test_calls_made_here_keep_their_order_and_leave_this_process_as_it_was():
    here = CallPool(0, 5)
    random.seed(1)
    torch.manual_seed(1)
    order = []

    def disturbs():
        order.append(threading.current_thread() is threading.main_thread())
        torch.manual_seed(0)
        torch.set_grad_enabled(False)

    before = num_threads()
    for i in range(3):
        here.start(i, disturbs)
    assert [k for k, _ in here.finished(wait=False)] == [0, 1, 2] and order == [True] * 3
    assert torch.is_grad_enabled() and num_threads() <= before  # those of other tests may end
    drawn = torch.rand(3)
    torch.manual_seed(0)
    assert not torch.equal(drawn, torch.rand(3))  # training does not go on from the seed of a tool
    here.close()


def test_calls_of_one_lane_follow_one_another_and_hold_no_worker():
    pool, under_way, order = CallPool(2, 1.0), [], []

    def work(i: int) -> None:
        under_way.append(i)
        time.sleep(0.4)
        order.append((i, len(under_way)))
        under_way.remove(i)

    for i in range(4):  # 1.6 s together, each within its 1 s
        pool.start(i, lambda i=i: work(i), lane="one")
    pool.start("hangs", lambda: time.sleep(1.6), lane="two")
    pool.start("follows", lambda: order.append("follows"), lane="two")
    found = {}
    while pool.num_waiting:
        found |= dict(pool.finished(wait=True))
    assert [each for each in order if each != "follows"] == [(0, 1), (1, 1), (2, 1), (3, 1)] and "follows" in order
    assert [found[i].error for i in range(4)] == [None] * 4 and found["hangs"].is_late
    pool.close()


def test_a_closed_pool_ends_its_threads_and_takes_no_more():
    pool, before = CallPool(2, 5), num_threads()
    begun, go_on = [], threading.Event()

    def hold():
        begun.append(1)
        go_on.wait(20)

    pool.start("later", lambda: later(1, 20))
    for i in range(4):
        pool.start(i, hold)
    wait_for(lambda: len(begun) == 2)
    pool.close()
    assert pool.num_waiting == 0 and pool.finished(wait=True) == []
    with pytest.raises(RuntimeError, match="closed"):
        pool.start(5, lambda: 1)
    go_on.set()
    wait_for(lambda: num_threads() <= before)
    assert len(begun) == 2  # what had not begun never does


@pytest.mark.parametrize("threads", [0, 2], ids=["here", "beside"])
def test_a_child_that_a_tool_forks_does_not_go_on_as_a_second_trainer(threads, capfd):
    def forks():
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return "child"

    with closing(CallPool(threads, 60)) as pool:  # to fork a process of gigabytes is not always done in 0.3 s
        assert outcome(pool, forks).value == 1
    assert "the environment forks" in capfd.readouterr().err


# -- Whatever a tool returns is text that a model can be shown ---------------------------------------------------------


class Silent:
    def __str__(self) -> str:
        raise RuntimeError("no words")


ROUND: list = []
ROUND.append(ROUND)


@pytest.mark.parametrize(("value", "text"), [
    ("two\nlines", "two\nlines"), ("", ""), (None, "null"), (True, "true"), (3, "3"), (0.5, "0.5"),
    (math.inf, "Infinity"), ({"a": [1, "é"]}, '{"a": [1, "é"]}'), ((1, 2), "[1, 2]"), ({"b", "a"}, '["a", "b"]'),
    ({"a": {3}}, '{"a": [3]}'),
    (np.float32(0.5), "0.5"), (np.arange(3), "[0, 1, 2]"), ({"x": torch.tensor([1, 2])}, '{"x": [1, 2]}'),
    (b"\x00\xff\x1b", "(3 bytes, which are not text)"), ({"a": b"xy"}, '{"a": "(2 bytes, which are not text)"}'),
    ([{"type": "text", "text": "a"}, {"type": "image", "image": object()}, {"type": "text", "text": "b"}],
     "a(an image, which is not shown)b"),
    (Silent(), "(a Silent, which cannot be shown: RuntimeError)"),
    (ROUND, "(a list, which cannot be shown: ValueError)"),
    ({(1, 2): 3}, "(a dict, which cannot be shown: TypeError)")], ids=lambda value: type(value).__name__)
def test_each_kind_of_answer_has_a_text(value, text):
    assert shown(value, 100) == text


@pytest.mark.parametrize(("value", "text"), [
    ("\x1b[2Jgone", "␛[2Jgone"), ("\x00\x07", "␀␇"), ("a\r\nb", "a\nb"), ("a\rb", "a␍b"), ("\u202eabc", "<U+202E>abc"),
    ("\ud83d", "\ufffd"), ("\ud83d\ude00", "😀"), ({"k\ud800": "\x1b"}, '{"k\ufffd": "\\u001b"}')])
def test_control_characters_and_lone_surrogates_are_replaced(value, text):
    assert shown(value, 100) == text
    shown(value, 100).encode()


def test_a_long_answer_is_cut_and_says_so():
    cut = "\n[cut here: only the first 5 characters of the answer are shown]"
    assert shown("abcde", 5) == "abcde"
    assert shown("abcdef", 5) == "abcde" + cut
    assert shown([11, 22], 5) == "[11, " + cut
    assert shown("\x9b" * 3, 5) == "<U+00" + cut  # shown as codes it is longer than it was
