"""What counts as growing too fast, by numbers whose answer is known, and the tables of growth."""

import harness
import pytest
import scaling
from harness import Times

SIZES = [8, 16, 32, 64, 128]


def is_too_fast(axis, costs):
    return scaling.growth_of(axis, SIZES, costs)["is_too_fast"]


def test_the_bend_is_the_share_of_the_square():
    sizes = [1, 2, 4, 8]
    assert scaling.bend(sizes, [3 + 2 * x for x in sizes]) == pytest.approx(0, abs=1e-9)
    # 1 + x + x^2: at 8 the square is 64 of 73
    assert scaling.bend(sizes, [1 + x + x * x for x in sizes]) == pytest.approx(64 / 73)
    assert scaling.bend(sizes, [10 + 20 * x - x * x for x in sizes]) < 0


def test_the_last_doubling():
    assert scaling.last_exponent([1, 2, 4, 8], [1, 1, 2, 8]) == pytest.approx(2)


def test_a_line_with_a_constant_is_not_too_fast_and_a_square_is():
    assert not is_too_fast("batch", [100 + 3 * n for n in SIZES])
    assert not is_too_fast("batch", [n**0.5 for n in SIZES])
    assert is_too_fast("batch", [100 + n * n for n in SIZES])


def test_attention_may_bend_the_growth_over_prompts_and_nothing_else():
    costs = [n + n * n / 256 for n in SIZES]  # at 128 a third is quadratic: the last doubling costs 2.4 times as much
    assert is_too_fast("batch", costs)
    assert not is_too_fast("prompt", costs)


def test_noise_of_one_measurement_is_no_curve():
    assert not is_too_fast("batch", [8, 16, 32, 58, 130])


@pytest.fixture
def row(monkeypatch):
    monkeypatch.setattr(harness, "machine", lambda: "a machine")
    times = [Times(s, s, s) for s in (1.0, 2.0, 4.0, 8.0, 32.0)]
    return scaling.measured("ppo", "batch", scaling.points_of("batch", False), times, [10**6] * 5, 16.0)


def test_a_row_says_what_was_measured_and_what_it_missed(row):
    assert (row["case"], row["ours"], row["floor_ratio"], row["missed"]) == ("ppo by batch", 32.0, 2.0, ["ours"])
    assert row["sizes"] == SIZES
    assert "time x size^2.00, memory x size^0.00" in row["work"]
    assert row["fits"]["memory"]["is_too_fast"] is False


def test_the_tables_have_each_cost_and_say_what_grows_too_fast(row):
    machine, seconds, memory = scaling.tables_of([row])
    assert "a machine" in machine
    sizes = "| ppo | batch | 8, 16, 32, 64, 128 | sequences |"
    assert f"{sizes} 1, 2, 4, 8, 32 | n^2.00 | " in seconds and seconds.endswith("| **too fast** |\n")
    assert f"{sizes} 1, 1, 1, 1, 1 | n^0.00 | " in memory and "too fast" not in memory
