"""Agreement of reward sources with labels: accuracy, Cohen's kappa, ties, failures, order consistency, and a table.

Items of one prompt (several pairs of its answers) are not independent, so intervals are over prompts: for accuracy
Wilson's (1927) with as many observations as prompts, for kappa the percentile bootstrap over prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from hybrid_rlhf.report.compare import Interval, Method, Section, print_table, text_table, wilson

# Landis and Koch (1977), Biometrics 33, p. 165: strength of agreement below 0, and up to a kappa
POOR, BANDS = "poor", ((0.2, "slight"), (0.4, "fair"), (0.6, "moderate"), (0.8, "substantial"), (1.0, "almost perfect"))
FEW = 50  # prompts: with fewer, the interval of an accuracy of 0.7 is wider than 0.25
COLUMNS = {"source": "source", "accuracy": "accuracy", "kappa": "Cohen's kappa", "band": "agreement",
           "ranking": "ranking", "ties": "ties", "order_consistency": "same in both orders", "failures": "failures"}


@dataclass(frozen=True)
class Agreement:
    """Agreement of one reward source with the labels.

    kind: pairs, or answers (labelled one by one). items: their number; failures: items without a verdict, which the
    other figures leave out. accuracy: share of correct verdicts, a tie counting half. kappa: Cohen's, None where it is
    not defined. ties: share of verdicts without a better answer. ranking: how often, of two answers with different
    labels, the better one scores higher, a tie counting half. order_consistency: share of pairs with the same verdict
    of a judge in both orders. threshold: score from which an answer counts as good.
    """

    source: str
    kind: str
    items: int
    prompts: int
    failures: int
    accuracy: float | None = None
    accuracy_interval: Interval | None = None
    kappa: float | None = None
    kappa_interval: Interval | None = None
    ties: float | None = None
    ranking: float | None = None
    order_consistency: float | None = None
    threshold: float | None = None

    @property
    def band(self) -> str | None:
        """The strength of agreement of this kappa by Landis and Koch (1977)."""
        if self.kappa is None:
            return None
        return POOR if self.kappa < 0 else next(name for top, name in BANDS if self.kappa <= top + 1e-12)


def kappas(tables: np.ndarray) -> np.ndarray:
    """Cohen's (1960) kappa of each of (R, K, K) tables of counts, NaN where both raters use one category only.

    Rows are one rater's categories, columns the other's: (p_o - p_e) / (1 - p_e), p_o the share on the diagonal, p_e
    the sum over categories of the product of the two raters' shares.
    """
    total = tables.sum((1, 2))
    with np.errstate(invalid="ignore", divide="ignore"):
        observed = np.trace(tables, axis1=1, axis2=2) / total
        expected = (tables.sum(1) * tables.sum(2)).sum(1) / total**2
        return np.where(expected < 1 - 1e-12, (observed - expected) / (1 - expected), np.nan)


def of_pairs(source: str, verdicts: Sequence[int | None], prompts: Sequence[int], is_consistent: Sequence[bool | None],
             method: Method) -> Agreement:
    """Agreement on pairs. verdicts: 1 where the source prefers what the label prefers, -1 the other, 0 neither, None
    without a verdict; prompts: the prompt of each pair; is_consistent: whether both orders gave the same verdict.

    For kappa every pair counts in both orders, as "the first" and as "the second is better": the order in the file is
    arbitrary. A tie is a third category, which no label has.
    """
    known = [i for i, verdict in enumerate(verdicts) if verdict is not None]
    swaps = [same for same in is_consistent if same is not None]
    asked = {"order_consistency": sum(swaps) / len(swaps)} if swaps else {}
    base = {"source": source, "kind": "pairs", "items": len(verdicts), "prompts": len({prompts[i] for i in known}),
            "failures": len(verdicts) - len(known)} | asked
    if not known:
        return Agreement(**base)
    tables = np.zeros((len(known), 3, 3))
    for row, i in enumerate(known):
        verdict = verdicts[i]
        first, second = (0, 1) if verdict == 1 else (1, 0) if verdict == -1 else (2, 2)
        tables[row, 0, first] += 1
        tables[row, 1, second] += 1
    values = np.asarray([verdicts[i] for i in known])
    return Agreement(**base, ties=float((values == 0).mean()),
                     **_measured((values + 1) / 2, tables, [prompts[i] for i in known], method))


def of_answers(source: str, scores: Sequence[float | None], labels: Sequence[float], prompts: Sequence[int],
               method: Method, threshold: float | None = None) -> Agreement:
    """Agreement on answers that are labelled one by one. scores: None without a score; labels: higher is better.

    With two different labels an answer counts as good from `threshold` on; None takes the score at which the source
    has as many good answers as the labels. With more labels only the ranking is computed.
    """
    known = [i for i, score in enumerate(scores) if score is not None and not math.isnan(score)]
    values, true = np.asarray([scores[i] for i in known], float), np.asarray([labels[i] for i in known], float)
    base = {"source": source, "kind": "answers", "items": len(scores), "prompts": len({prompts[i] for i in known}),
            "failures": len(scores) - len(known), "ranking": concordance(values, true)}
    if not known or len(set(labels)) != 2:
        return Agreement(**base)
    is_good = true == max(labels)
    cut = _same_share(values, int(is_good.sum())) if threshold is None else threshold
    says_good = values >= cut
    tables = np.zeros((len(known), 2, 2))
    tables[np.arange(len(known)), is_good.astype(int), says_good.astype(int)] = 1
    right = (is_good == says_good).astype(float)
    return Agreement(**base, threshold=float(cut), **_measured(right, tables, [prompts[i] for i in known], method))


def concordance(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """How often, over all pairs of answers with different labels, the better one scores higher; a tie counts half. With
    two labels it is the area under the ROC curve. None where all labels are the same."""
    won, count = 0.0, 0
    for value in np.unique(labels)[1:]:
        above, below = scores[labels == value], np.sort(scores[labels < value])
        won += (np.searchsorted(below, above, "left") + np.searchsorted(below, above, "right")).sum() / 2
        count += len(above) * len(below)
    return float(won / count) if count else None


def _same_share(scores: np.ndarray, count: int) -> float:
    """The threshold at which the number of good answers is closest to `count`; above all scores for none."""
    values = np.unique(scores)
    cuts = [*values.tolist(), math.nextafter(float(values[-1]), math.inf)]
    return min(cuts, key=lambda cut: (abs(int((scores >= cut).sum()) - count), cut))


def _measured(right: np.ndarray, tables: np.ndarray, prompts: Sequence[int], method: Method) -> dict:
    """accuracy and kappa of N items, with intervals. right (N,): 1, 0, or 0.5; tables (N, K, K)."""
    places = np.unique(np.asarray(prompts), return_inverse=True)[1]
    summed = np.zeros((places.max() + 1, *tables.shape[1:]))
    np.add.at(summed, places, tables)
    kappa = float(kappas(tables.sum(0)[None])[0])
    accuracy, count = float(right.mean()), len(summed)
    return {"accuracy": accuracy, "accuracy_interval": wilson(accuracy * count, count, method.confidence),
            "kappa": None if math.isnan(kappa) else kappa, "kappa_interval": _kappa_interval(summed, method)}


def _kappa_interval(tables: np.ndarray, method: Method) -> Interval | None:
    """Percentile bootstrap over (P, K, K) tables of prompts; None where all resamples have one kappa, as where every
    verdict is right: then only the accuracy's interval shows the uncertainty."""
    rng, count = np.random.default_rng(method.seed), len(tables)
    flat, resampled, chunk = tables.reshape(count, -1), [], max(1, 4_000_000 // count)
    for first in range(0, method.num_resamples, chunk):
        weights = rng.multinomial(count, [1 / count] * count, size=min(chunk, method.num_resamples - first))
        resampled.append(kappas((weights @ flat).reshape(-1, *tables.shape[1:])))
    values = np.concatenate(resampled)
    values = values[~np.isnan(values)]
    if not len(values) or values.max() - values.min() < 1e-12:
        return None
    tail = (1 - method.confidence) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def cells(rows: Sequence[Agreement]) -> list[dict[str, str]]:
    """The table as text: a row for each source, without columns that are empty for all."""
    names = [n for n in COLUMNS if any(getattr(row, n) is not None for row in rows)]
    return [{COLUMNS[n]: _cell(row, n) for n in names} for row in rows]


def _cell(row: Agreement, name: str) -> str:
    value = getattr(row, name)
    if name == "failures":
        return f"{value} of {row.items}"
    if value is None or isinstance(value, str):
        return value or ""
    if name in ("ties", "order_consistency"):
        return f"{value:.1%}"
    interval = getattr(row, f"{name}_interval", None)
    return f"{value:.3f}" + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "")


def how_to_read(rows: Sequence[Agreement], method: Method) -> list[str]:
    """Sentences below the table that explain it."""
    bands = ", ".join(f"up to {top:g} {name}" for top, name in BANDS)
    lines = [f"Kappa is the agreement beyond chance (0: as a coin, 1: always); Landis and Koch (1977) call it {POOR} "
             f"below 0, {bands}. InstructGPT's labellers agreed with each other on 73% of the pairs, a kappa of 0.45.",
             f"Brackets: {method.confidence:.0%} intervals over prompts (accuracy: Wilson, kappa: bootstrap of "
             f"{method.num_resamples} resamples). A tie is half right, and agrees with no label; failures count "
             "nowhere else."]
    if any(row.threshold is not None for row in rows):
        cuts = ", ".join(f"{row.source} {row.threshold:.4g}" for row in rows if row.threshold is not None)
        lines.append(f"An answer counts as called good from this score on: {cuts}. A score without a scale of its own "
                     "is cut where it calls as many answers good as the labels do. Ranking: of a good and a bad "
                     "answer, how often the good one scores higher.")
    few = max((row.prompts for row in rows), default=0)
    if few == 0:
        lines.append("No item has a verdict or a score: nothing was measured.")
    elif few < FEW:
        lines.append(f"Only {few} labelled prompts: give {FEW} or more, better hundreds, before a judge is trusted.")
    return lines


def section(rows: Sequence[Agreement], method: Method) -> Section:
    """The table for evaluate.md, and the numbers for evaluate.json."""
    lines = ["## Agreement with the labels", "", *text_table(cells(rows)), ""]
    lines += [f"- {line}" for line in how_to_read(rows, method)]
    return Section(lines, {"agreement": [asdict(row) | {"band": row.band} for row in rows]})


def show(agreements: Sequence[Agreement], method: Method) -> None:
    """Print the table on stdout."""
    console = print_table(f"Agreement with the labels, {method.confidence:.0%} intervals", cells(agreements))
    for line in how_to_read(agreements, method):
        console.print(line, soft_wrap=True)
