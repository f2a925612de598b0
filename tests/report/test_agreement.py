"""Agreement of sources with labels: kappa by hand, and by its definition written anew; ties, failures, intervals."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.report import agreement
from hybrid_rlhf.report.agreement import concordance, kappas, of_answers, of_pairs
from hybrid_rlhf.report.compare import Method

METHOD = Method(0.95, 500, 0)


def kappa(table) -> float:
    return float(kappas(np.asarray([table], float))[0])


def test_kappa_is_that_of_the_textbooks() -> None:
    # 20 + 15 of 50 agree: p_o 0.7; raters say yes 25/50 and 30/50: p_e = 0.5 * 0.6 + 0.5 * 0.4 = 0.5; (0.7-0.5)/0.5
    assert kappa([[20, 5], [10, 15]]) == pytest.approx(0.4)
    # three categories: p_o 0.44 + 0.20 + 0.06, p_e 0.6 * 0.5 + 0.3 * 0.3 + 0.1 * 0.2 = 0.41
    assert kappa([[44, 7, 9], [5, 20, 5], [1, 3, 6]]) == pytest.approx((0.70 - 0.41) / 0.59)
    assert kappa([[5, 0], [0, 5]]) == 1 and kappa([[0, 5], [5, 0]]) == -1
    assert math.isnan(kappa([[7, 0], [0, 0]]))  # one category alone: 0 / 0


@pytest.mark.parametrize(("value", "band"), [(-0.01, "poor"), (0.0, "slight"), (0.2, "slight"), (0.21, "fair"),
                                             (0.41, "moderate"), (0.61, "substantial"), (0.81, "almost perfect"),
                                             (1.0, "almost perfect")])
def test_bands_are_those_of_landis_and_koch(value, band) -> None:
    assert agreement.Agreement("a", "pairs", 1, 1, 0, kappa=value).band == band


def test_pairs_by_hand() -> None:
    """7 right, 2 wrong, 1 tie, 2 failures: accuracy (7 + 0.5) / 10. For kappa every pair stands in both orders: p_o
    0.7, the label says first and second half of the time each, the source 0.45 each: p_e 0.45; 0.25 / 0.55."""
    verdicts = [1] * 7 + [-1] * 2 + [0] + [None] * 2
    found = of_pairs("judge", verdicts, range(12), [True] * 6 + [False] * 4 + [None] * 2, METHOD)
    assert (found.items, found.prompts, found.failures) == (12, 10, 2)
    assert found.accuracy == pytest.approx(0.75) and found.ties == pytest.approx(0.1)
    assert found.kappa == pytest.approx(0.25 / 0.55) and found.band == "moderate"
    assert found.order_consistency == pytest.approx(0.6)
    low, high = found.accuracy_interval  # Wilson, 7.5 of 10, z 1.959964: by the quadratic that defines it
    for bound in (low, high):
        assert abs(0.75 - bound) == pytest.approx(1.959964 * math.sqrt(bound * (1 - bound) / 10), rel=1e-5)
    assert found.kappa_interval[0] < found.kappa < found.kappa_interval[1]


def test_a_coin_that_always_names_the_same_side_has_no_agreement() -> None:
    found = of_pairs("coin", [1, -1] * 20, range(40), [], METHOD)
    assert found.accuracy == 0.5 and found.kappa == pytest.approx(0) and found.order_consistency is None
    tied = of_pairs("ties", [0] * 8, range(8), [], METHOD)
    assert tied.accuracy == 0.5 and tied.kappa == 0 and tied.ties == 1


def test_perfect_agreement_claims_no_certainty_about_kappa() -> None:
    found = of_pairs("judge", [1] * 5, range(5), [], METHOD)
    assert found.kappa == 1 and found.kappa_interval is None and found.accuracy_interval[0] < 0.6


def test_pairs_of_one_prompt_are_one_observation() -> None:
    """The same verdicts from a tenth of the prompts: the interval is as wide as that of so many prompts."""
    verdicts = ([1] * 30 + [-1] * 10) * 2
    many = of_pairs("a", verdicts, range(80), [], METHOD)
    few = of_pairs("a", verdicts, [i // 10 for i in range(80)], [], METHOD)
    assert few.accuracy == many.accuracy and few.kappa == many.kappa and few.prompts == 8
    assert few.accuracy_interval[1] - few.accuracy_interval[0] > 2 * (many.accuracy_interval[1]
                                                                      - many.accuracy_interval[0])


def test_without_any_verdict_there_is_no_number() -> None:
    pairs = of_pairs("a", [None, None], [0, 1], [None, None], METHOD)
    for found in (pairs, of_answers("a", [None], [1], [0], METHOD)):
        assert found.accuracy is None and found.kappa is None and found.failures == found.items
    lines = agreement.section([pairs], METHOD).lines
    assert any("2 of 2" in line for line in lines)
    assert any("nothing was measured" in line for line in lines) and not any("Only 0" in line for line in lines)


def test_labelled_answers_by_hand() -> None:
    """At 0.5: good 0.9, 0.6, 0.2; bad 0.5, 0.1, 0.3. Called good: two of the good, one of the bad: accuracy 4/6,
    kappa (4/6 - 1/2) / (1/2). Ranking: the good ones beat 3, 3 and 1 of three bad ones: 7 of 9."""
    scores, labels = [0.9, 0.6, 0.2, 0.5, 0.1, 0.3], [1, 1, 1, 0, 0, 0]
    found = of_answers("judge", scores, labels, range(6), METHOD, threshold=0.5)
    assert found.accuracy == pytest.approx(4 / 6) and found.kappa == pytest.approx(1 / 3)
    assert found.ranking == pytest.approx(7 / 9) and found.threshold == 0.5


def test_scores_of_any_scale_are_cut_where_as_many_are_good_as_labelled() -> None:
    found = of_answers("model", [-30.0, 5.0, 7.0, -8.0, None], [0, 1, 1, 0, 1], range(5), METHOD)
    assert found.threshold == 5.0 and found.accuracy == 1.0 and found.failures == 1
    same = of_answers("constant", [2.0, 2.0, 2.0], [1, 0, 0], range(3), METHOD)  # none called good is nearer to one
    assert same.accuracy == pytest.approx(2 / 3) and same.kappa == 0


def test_more_than_two_grades_have_a_ranking_alone() -> None:
    """Three pairs of different grades; one is the wrong way round, one tied: 1.5 of 3."""
    found = of_answers("model", [1.0, 1.0, 0.0], [1, 2, 3], range(3), METHOD)
    assert found.ranking == pytest.approx(0.5 / 3) and found.accuracy is None and found.kappa is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=25))
def test_ranking_is_the_count_over_all_pairs(rows) -> None:
    pairs = [(a, b) for a, b in product(rows, rows) if a[1] > b[1]]
    won = sum(1.0 if a[0] > b[0] else 0.5 if a[0] == b[0] else 0.0 for a, b in pairs)
    found = concordance(np.asarray([r[0] for r in rows], float), np.asarray([r[1] for r in rows], float))
    assert found == (pytest.approx(won / len(pairs)) if pairs else None)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([1, 0, -1, None]), st.integers(0, 5)), min_size=1, max_size=30))
def test_any_verdicts_give_numbers_in_their_ranges_or_none(rows) -> None:
    verdicts, prompts = [r[0] for r in rows], [r[1] for r in rows]
    found = of_pairs("a|b", verdicts, prompts, [], Method(0.9, 50, 1))
    known = [v for v in verdicts if v is not None]
    assert found.failures == len(rows) - len(known)
    if known:
        right, tie = known.count(1) / len(known), known.count(0) / len(known)
        assert found.accuracy == pytest.approx(right + tie / 2)
        expected = (1 - tie) / 2  # of the definition, on the table of both orders
        assert found.kappa == pytest.approx((right - expected) / (1 - expected))
        assert found.accuracy_interval[0] <= found.accuracy + 1e-12
        assert found.accuracy <= found.accuracy_interval[1] + 1e-12
    assert "a\\|b" in "\n".join(agreement.section([found], METHOD).lines)
