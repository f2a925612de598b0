"""What the benchmarks of training steps share: random models in a folder, and two sides whose steps alternate.

The models are Llama-shaped, 134M, in bf16 unless a script says otherwise. floor_ratio is our time over that of the
step's matrix products at the measured rate plus its unavoidable bytes at the measured bandwidth (floors.py), the median
of floors whose rates are measured after each round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import harness
from harness import Case, seconds, timed_row, with_floors, write_rows
from random_models import SHAPES, make_folders

from hybrid_rlhf.core.memory import keep_freed_blocks


class Step(NamedTuple):
    """Both sides of a case. ours, peer: do one step.

    floors(): seconds, and a line about them, by the key of our ratio to them. num_tokens: of a step, where tokens per
    second are compared. extra(): other figures, of the newest steps. close(): ends the peer.
    """

    ours: Callable[[], object]
    peer: Callable[[], object]
    floors: Callable[[], dict[str, tuple[float, str]]]
    num_tokens: float | None = None
    extra: Callable[[], dict] = dict
    close: Callable[[], object] = lambda: None


def parser_of(doc: str, cases: dict[str, Case], repeats: int) -> argparse.ArgumentParser:
    return harness.add_clock(harness.parser_of(doc, cases, repeats))


def run(cases: dict[str, Case], parser: argparse.ArgumentParser, argv: Sequence[str] | None,
        shape: str = "llama134m") -> None:
    """Measure the cases that were asked for. A case's `open_peer(options)` is called before anything of ours is made:
    ours makes a process group, to which TRL would adapt. `prepare(options, peer)` then gives a Step, or the row itself.
    """
    options = harness.parse(parser, argv)
    options.shape = "tiny" if options.quick else shape
    options.vocab = SHAPES[options.shape][1]["vocab_size"]
    keep_freed_blocks()  # as the launcher does; a peer in the same process profits as well
    with tempfile.TemporaryDirectory() as folder:
        options.place = Path(folder)
        make_folders(options.shape, options.place)
        openers = dict.fromkeys(cases[name].open_peer for name in options.cases)
        peers = {opener: opener and opener(options) for opener in openers}
        rows = (measured(name, cases[name], options, peers[cases[name].open_peer]) for name in options.cases)
        write_rows((row for row in rows if row), options.json)


def measured(name: str, case: Case, options: argparse.Namespace, peer: object) -> dict | None:
    step = case.prepare(options, peer)
    if isinstance(step, dict):
        return step
    try:
        times, found = with_floors(options.repeats, step.floors, partial(seconds, step.ours),
                                   partial(seconds, step.peer))
    finally:
        step.close()
    floors = {key: statistics.median_low(floors[key] for floors in found) for key in found[0]}
    row = timed_row(name, case, times, {key: floor for key, (floor, _) in floors.items()}, step.num_tokens,
                    **step.extra())
    print("\n".join(f"{'':16} {line}" for _, line in floors.values()), flush=True)
    return row
