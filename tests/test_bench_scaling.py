"""What counts as growing too fast, and the page of growth."""

import pytest
import scaling
import scaling_page
from harness import Times

SIZES = [8, 16, 32, 64, 128]


def test_a_line_with_a_constant_is_not_too_fast_and_a_square_is():
    assert not scaling.is_too_fast("batch", SIZES, [100 + 3 * n for n in SIZES])
    assert not scaling.is_too_fast("batch", SIZES, [n**0.5 for n in SIZES])
    assert scaling.is_too_fast("batch", SIZES, [100 + n * n for n in SIZES])


def test_attention_may_bend_the_growth_over_prompts_and_nothing_else():
    costs = [n + n * n / 256 for n in SIZES]  # at 128 a third is quadratic: the last doubling costs 2.4 times as much
    assert scaling.is_too_fast("batch", SIZES, costs)
    assert not scaling.is_too_fast("prompt", SIZES, costs)


def test_noise_of_one_measurement_is_no_curve():
    assert not scaling.is_too_fast("batch", SIZES, [8, 16, 32, 58, 130])


@pytest.fixture
def row(monkeypatch):
    monkeypatch.setattr(scaling, "machine", lambda: "a machine")
    times = [Times(s, s, s) for s in (1.0, 2.0, 4.0, 8.0, 32.0)]
    return scaling.row_of("ppo", "batch", times, [10**6] * 5, 16.0)


def test_a_row_says_what_was_measured_and_what_it_missed(row):
    assert (row["case"], row["ours"], row["floor_ratio"], row["is_missed"]) == ("ppo by batch", 32.0, 2.0, True)
    assert row["sizes"] == SIZES
    assert "time x size^2.00, memory x size^0.00" in row["work"]
    assert row["fits"]["memory"]["is_too_fast"] is False


def test_the_page_names_what_grows_too_fast_and_draws_both_pictures(row, tmp_path):
    scaling_page.write([row], tmp_path, 2)
    page = (tmp_path / "scaling.md").read_text()
    assert "| PPO step | batch | 8, 16, 32, 64, 128 | 1, 2, 4, 8, 32 |" in page
    assert page.endswith("Too fast: ppo by batch (time).\n")
    for name in ("scaling_time.png", "scaling_memory.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
