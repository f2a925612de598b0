"""How long what is left takes: steps by their tokens, what is known before and within the first one, and phases."""

from __future__ import annotations

import time

import pytest

from hybrid_rlhf.core import activity
from hybrid_rlhf.report.pace import ANSWER, EVALUATE, EXPORT, SAVE, Forecast, Pace
from hybrid_rlhf.report.terminal import Progress, forecast_line

INF = float("inf")


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def step(pace: Pace, clock: list[float], number: int, seconds: float, tokens: int = 0) -> None:
    pace.tokens = tokens
    clock[0] += seconds
    pace.mark(number)


def test_steps_to_come_cost_their_tokens_at_the_seconds_a_token_of_those_taken(clock):
    pace = Pace(10)
    pace.forecast = Forecast(tokens=100.0)
    pace.begin()
    for number, (seconds, tokens) in enumerate(((50.0, 90), (3.0, 300), (1.0, 100)), start=1):
        step(pace, clock, number, seconds, tokens)
    assert pace.step_seconds() == pytest.approx(1.0)  # 4 s for 400 tokens, the first step left out
    assert pace.seconds_left() == pytest.approx(7.0)


def test_half_of_the_steps_and_ten_at_least_say_how_long_the_next_take(clock):
    pace = Pace(100)
    pace.begin()
    for number in range(1, 31):
        step(pace, clock, number, 9.0 if number <= 15 else 1.0)
    assert pace.step_seconds() == 1.0  # 15 of the 30
    pace = Pace(100)
    pace.begin()
    for number in range(1, 13):
        step(pace, clock, number, 9.0 if number <= 2 else 1.0)
    assert pace.step_seconds() == 1.0  # ten of twelve


def test_a_short_first_step_says_nothing_and_a_rehearsed_one_before_it_does(clock):
    pace = Pace(4)
    pace.begin()
    step(pace, clock, 1, 4.0)
    assert pace.seconds_left() == INF
    pace = Pace(4)
    pace.is_rehearsed, pace.rehearsed = True, 2.0
    pace.begin()
    assert pace.seconds_left() == 8.0
    step(pace, clock, 1, 30.0)
    assert pace.seconds_left() == 6.0


def test_a_long_first_step_is_known_once_two_parts_of_its_training_are_done(clock):
    """SmolLM2's first minibatch of PPO, in which Adam makes its moments, said 79 s a step where 60 were real."""
    pace = Pace(3)
    pace.begin()
    clock[0] += 20.0  # sampling and scoring
    for number, _ in enumerate(activity.parts("training, minibatch", range(4), 4)):
        pace.hear()
        assert pace.rehearsed == (INF if number < 2 else 20.0 + 4 * 5.0)
        clock[0] += 5.0 if number else 8.0
    assert pace.seconds_left() == 3 * 40.0 - 43.0
    activity.doing("")
    pace.mark(1)
    assert pace.seconds_left() == 80.0


def test_phases_ahead_are_part_of_what_is_left_until_they_are_over(clock):
    pace = Pace(2)
    pace.is_rehearsed, pace.rehearsed = True, 6.0
    pace.forecast = Forecast(lambda _step: {EVALUATE: 1, SAVE: 1, EXPORT: 1}, {SAVE: 7.0, EXPORT: 3.0},
                             eval_batches=4, eval_share=0.5)
    pace.begin()
    assert pace.seconds_left() == 2 * 6.0 + 4 * 0.5 * 6.0 / 3 + 7.0 + 3.0
    for number in (1, 2):
        step(pace, clock, number, 6.0)
    assert pace.seconds_left() == 4.0 + 7.0 + 3.0, "never 0 before work of seconds"
    pace.begin_phase(EVALUATE)
    clock[0] += 1.5
    assert pace.seconds_left() == 2.5 + 7.0 + 3.0 and pace.phase_age == 1.5
    clock[0] += 8.5
    pace.end_phase()
    assert pace.seconds_left() == 7.0 + 3.0 and pace.phase_seconds(EVALUATE) == 10.0


def test_a_phase_takes_as_long_as_measured_and_no_guess_or_passed_time_is_named(clock):
    progress = Progress("sft", (), 2)
    pace = progress.pace
    pace.forecast = Forecast(guesses={SAVE: 60.0})
    shown = []
    for seconds in (9.0, 5.0):  # the first time there is a guess alone
        pace.begin_phase(SAVE)
        clock[0] += 2.0
        shown.append(progress._expected())
        clock[0] += seconds
        if len(shown) == 2:
            shown.append(progress._expected() or "none")
            clock[0] += 5.0
            shown.append(progress._expected())
        pace.end_phase()
    assert shown == ["", ", about 11 s", ", about 11 s", ""]


def test_the_rehearsal_and_the_answers_before_it_are_no_part_of_what_is_ahead(clock):
    """SmolLM2's one step of 9.5 s with 6 s of saving said 6 s in all."""
    pace = Pace(1)
    pace.forecast = Forecast(lambda _step: {ANSWER: 1, EXPORT: 1}, {EXPORT: 6.0})
    pace.begin()
    pace.begin_phase(ANSWER)
    clock[0] += 8.0
    pace.end_phase()
    clock[0] += 9.0
    pace.is_rehearsed, pace.rehearsed = True, 9.5
    pace.begin_steps()
    assert pace.seconds_left() == 9.5 + 8.0 + 6.0


def test_the_line_before_the_first_step_says_what_a_limit_of_time_leaves(clock):
    lines = []
    for limit in (None, 1500.0, 3000.0):
        pace = Pace(16, limit)
        pace.is_rehearsed, pace.rehearsed = True, 170.0
        pace.begin()
        lines.append(forecast_line(pace))
    assert lines == ["time: about 45 minutes (16 steps of about 170 s)",
                     "time: about 26 minutes (about 9 of 16 steps, by train.max_seconds, of about 170 s)",
                     "time: about 45 minutes (16 steps of about 170 s)"]


def test_the_parts_of_the_line_add_up_to_its_total(clock):
    """It once said: 93 s (5 steps of about 22 s; 4 s of it for ...)."""
    pace = Pace(5)
    pace.forecast = Forecast(lambda _step: {EXPORT: 1}, {EXPORT: 4.0})
    pace.begin()
    pace.is_rehearsed, pace.rehearsed = True, 12.0
    clock[0] += 11.0  # within the first step
    assert forecast_line(pace) == "time: about 64 s (5 steps of about 12 s; 4 s of it for exporting the model)"
    pace.first = 8
    pace.total = 20
    pace.begin()
    for number in (9, 10):
        step(pace, clock, number, 3.9)
    assert forecast_line(pace) == "time: about 43 s (10 more steps of about 3.9 s; 4 s of it for exporting the model)"


def test_what_comes_after_the_limit_of_time_is_said_and_counted_once(clock):
    pace = Pace(100, 60.0)
    pace.forecast = Forecast(lambda _step: {SAVE: 4, EXPORT: 1}, {SAVE: 2.0, EXPORT: 4.0})
    pace.is_rehearsed, pace.rehearsed = True, 10.0
    pace.begin()
    clock[0] += 5.0
    assert forecast_line(pace) == ("time: about 66 s (about 6 of 100 steps, by train.max_seconds, of about 10 s; 6 s "
                                   "after them for saving a checkpoint, exporting the model)")
