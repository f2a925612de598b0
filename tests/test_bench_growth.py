"""Fits of growth, on numbers whose answer is known."""

import growth
import pytest

SIZES = [1, 2, 4, 8]


def test_a_line_is_found_with_its_constant():
    assert growth.line(SIZES, [5, 7, 11, 19]) == pytest.approx((3, 2, 1))


def test_a_line_through_three_points_by_hand():
    # relative residuals 1 - a - b, (2 - a - 2b) / 2, (2 - a - 4b) / 2: their squares are least where
    # 1.5 a + 2.5 b = 2 and 2.5 a + 6 b = 4
    found = growth.line([1, 2, 4], [1, 2, 2])
    assert (found.constant, found.slope) == (pytest.approx(8 / 11), pytest.approx(4 / 11))


def test_a_power_law_is_found():
    assert growth.power(SIZES, [3, 12, 48, 192]) == pytest.approx((3, 2, 1))


def test_r2_of_costs_that_do_not_grow_with_the_size():
    # logarithms 0, 1, 0 against 0, 1, 2: the best line is flat at 1/3 and explains nothing
    e = 2.718281828459045
    found = growth.power([1, e, e * e], [1, e, 1])
    assert found.exponent == pytest.approx(0)
    assert found.r2 == pytest.approx(0)


def test_the_bend_is_the_share_of_the_square():
    assert growth.bend(SIZES, [3 + 2 * x for x in SIZES]) == pytest.approx(0, abs=1e-9)
    # 1 + x + x^2: at 8 the square is 64 of 73
    assert growth.bend(SIZES, [1 + x + x * x for x in SIZES]) == pytest.approx(64 / 73)
    assert growth.bend(SIZES, [10 + 20 * x - x * x for x in SIZES]) < 0


def test_the_last_doubling():
    assert growth.local_exponent(SIZES, [1, 1, 2, 8]) == pytest.approx(2)
