"""Episodes of several turns with tools: ours beside the same engine with a barrier per turn, and beside TRL's loop.

    python benchmarks/episodes.py [--works ragged even instant history] [--json FILE] [--page FILE] [--image FILE]

32 episodes of 3 turns, 4 prompts with 8 samples each; between two turns a tool is called that sleeps 0 to 500 ms, drawn
once, and 48 tokens are added. A turn is a call (21 tokens; the last turn calls nothing) and a thought: of 24 tokens in
`even`; of lengths drawn once from a geometric law with mean 24, at most 128, in `ragged`; `instant` is `ragged` with
tools that answer at once. All sides alternate, after a round that is not measured: ours, which waits for nobody; the
same engine, where all turns of a round are sampled, all tools awaited side by side, then the next round begins
(peers/turn_barrier.py); and TRL's GRPOTrainer until its episodes are there, with transformers' generate
(peers/trl_episodes.py), which calls one tool after the other and reads the whole history again for each turn. The model
is random; what it draws is replaced by what is written down when a turn has its length, on all sides, so all say the
same tokens, or nothing is measured. `history`: seconds of each turn of long episodes, 12 turns of 24 tokens with 48
added, 8 episodes side by side, instant tools, ours with the barrier, so that turns have an end. Single-turn generation:
rollout.py.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

import harness
import torch
from episode_talk import CALL_TOKENS, Place, Talk, WrittenTurns, write
from harness import Case, Times, row_of, seconds, sizes_of, table_of, timed_row, write_rows, write_tables
from peers.trl_episodes import TrlEpisodes
from peers.turn_barrier import BarrierPool, BarrierTurns
from random_models import SHAPES, ragged_limits
from torch import nn

from hybrid_rlhf.core.allocator import keep_freed_blocks
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.environments.calls import CallPool
from hybrid_rlhf.environments.settings import EnvironmentConfig
from hybrid_rlhf.report.plots import COLOURS
from hybrid_rlhf.rollout import episodes as player

PROMPTS, GROUP, ADDED, LONGEST = 4, 8, 48, 0.5
THOUGHT, MOST = 24, 128  # tokens of a turn beside its call
TURNS, NEW, ROWS = 12, 24, 8  # of `history`


class Ours:
    """play() plays all episodes of a talk; with a barrier per turn .ended says when each round was sampled.

    .tokens: each response; .began: when the turns were opened. The clock is time.perf_counter.
    """

    def __init__(self, talk: Talk, model: nn.Module) -> None:
        self.talk, self.engine = talk, HybridEngine.for_inference(model, talk.tokenizer)
        self.engine.eos_ids = []  # lengths are the benchmark's
        self._open_turns = self.engine.open_turns
        config = EnvironmentConfig(factory="place", num_workers=len(talk.rows), max_turns=100)
        # a player keeps its pool of calls, so the barrier has a player of its own
        self.player, self.stopping = (player.EpisodePlayer(talk.environments, config, talk.tokenizer) for _ in "12")
        self.tokens: list[list[int]] = []
        self.began, self.ended = 0.0, [0.0]

    def play(self) -> None:
        self._play(self.player, self._written)

    def play_with_barrier(self) -> None:
        def open_turns(*given: object) -> BarrierTurns:
            turns = BarrierTurns(self._written(*given))
            self.began, self.ended = perf_counter(), turns.ended
            return turns

        with patch.object(player, "CallPool", lambda *given: BarrierPool(CallPool(*given))):
            self._play(self.stopping, open_turns)
        if len(self.ended) != max(map(len, self.talk.turns)):
            raise SystemExit(f"{len(self.ended)} rounds, where each turn is one; there is no barrier")

    def _written(self, *given: object) -> WrittenTurns:
        return WrittenTurns(self._open_turns(*given), self.talk)

    def _play(self, episode_player: player.EpisodePlayer, open_turns: Callable) -> None:
        sampling = SamplingConfig(max_new_tokens=self.talk.most)
        with self.engine.inference(), patch.object(self.engine, "open_turns", open_turns):
            rollout = episode_player.play(self.engine, self.talk.prompts, sampling, 0, range(len(self.talk.rows)))
        lengths = rollout.response_mask.sum(1).tolist()
        self.tokens = [ids[:n] for ids, n in zip(rollout.response_ids.tolist(), lengths, strict=True)]


# -- seconds of all episodes -------------------------------------------------------------------------------------------


def talk_of(options: argparse.Namespace, work: str) -> Talk:
    group, thought, most = sizes_of(options, GROUP, THOUGHT, MOST)
    count = PROMPTS * group
    longest = 0.0 if work == "instant" else sizes_of(options, int(1000 * LONGEST))[0] / 1000
    draws = torch.Generator().manual_seed(3)
    thoughts = [[thought] * count if work == "even" else ragged_limits(count, thought, most, draws) for _ in range(3)]
    lengths = [[CALL_TOKENS + a, CALL_TOKENS + b, 1 + c] for a, b, c in zip(*thoughts, strict=True)]
    return write(lengths, group, ADDED, longest)


def sides_of(options: argparse.Namespace, talk: Talk, has_peer: bool = True) -> tuple[Ours, TrlEpisodes | None]:
    """Both, once it is clear that they say the same."""
    peer = TrlEpisodes(model_of(options), talk.tokenizer, talk.rows, talk.turns, Place, talk.most,
                       options.place) if has_peer else None
    ours = Ours(talk, model_of(options))
    for play, side in ((ours.play, ours), (ours.play_with_barrier, ours), *((peer.step, peer) for _ in [0] if peer)):
        play()
        if side.tokens != talk.responses:
            raise SystemExit(f"{type(side).__name__} does not say what was written down; not measured")
    return ours, peer


def model_of(options: argparse.Namespace) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    kind, settings = SHAPES["tiny" if options.quick else options.shape]
    settings = settings | dict(vocab_size=2048, max_position_embeddings=2048)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings, pad_token_id=0)).to(
        getattr(torch, options.dtype)).eval()


def rows_of_work(options: argparse.Namespace, work: str) -> Iterator[dict]:
    """Two rows, of the same rounds."""
    talk = talk_of(options, work)
    ours, peer = sides_of(options, talk, f"{work}_trl" in CASES)  # the unmeasured round
    sides = [ours.play, ours.play_with_barrier, *([peer.step] if peer else [])]
    rounds = [[seconds(side) for side in sides] for _ in range(options.repeats)]
    mine, *peers = zip(*rounds, strict=True)
    waits = [wait for row in talk.rows for wait in row["seconds"]]
    about = {"new_tokens": sum(len(turn) for turns in talk.turns for turn in turns), "calls": len(waits),
             "slept": sum(waits), "longest_sleep": max(sum(row["seconds"]) for row in talk.rows)}
    for name, theirs in zip(("barrier", "trl"), peers, strict=False):
        ratios = [t / m for m, t in zip(mine, theirs, strict=True)]
        yield timed_row(f"{work}_{name}", CASES[f"{work}_{name}"], [Times.of(mine), Times.of(theirs)], unit="s",
                        ratio_range=[min(ratios), max(ratios)], **about)


# -- seconds of each turn ----------------------------------------------------------------------------------------------


def rows_of_history(options: argparse.Namespace) -> Iterator[dict]:
    """One row: seconds of each turn of both sides, and what a hundred tokens of history add to them."""
    turns, rows = (4, 2) if options.quick else (TURNS, ROWS)
    talk = write([[NEW] * turns] * rows, 1, ADDED, 0.0)
    ours, peer = sides_of(options, talk)
    mine, theirs = [], []
    for _ in range(options.repeats):
        ours.play_with_barrier()
        mine.append(between([ours.began, *ours.ended]))
        peer.step()
        theirs.append(between([*peer.began, perf_counter()]))
    histories = [talk.prompt + k * (NEW + ADDED) for k in range(turns)]
    sides = [[statistics.median(turn) for turn in zip(*runs, strict=True)] for runs in (mine, theirs)]
    growth = [slope(histories[1:], side[1:]) for side in sides]  # the first turn reads the prompt
    yield row_of("history", CASES["history"], sides[0][-1], sides[1][-1], "s", histories=histories,
                 ours_turns=sides[0], peer_turns=sides[1], ours_per_100=100 * growth[0], peer_per_100=100 * growth[1])


def between(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    return statistics.linear_regression(x, y).slope


# -- the page ----------------------------------------------------------------------------------------------------------


def tables_of(rows: list[dict]) -> list[str]:
    """Whole episodes; turns by their history."""
    whole = [(row["work"], row["beside"], ranged(row, "ours"), ranged(row, "peer"),
              f"{row['ratio']:.2f} ({row['ratio_range'][0]:.2f}-{row['ratio_range'][1]:.2f})", row["asked"])
             for row in rows if row["case"] != "history"]
    turns = [(n, f"{1000 * a:.0f}", f"{1000 * b:.0f}") for row in rows if row["case"] == "history"
             for n, a, b in zip(row["histories"], row["ours_turns"], row["peer_turns"], strict=True)]
    return [table_of(("work", "beside", "ours, s", "peer's, s", "ratio", "asked"), whole),
            table_of(("tokens before the turn", "ours, ms", "TRL's loop, ms"), turns)]


def ranged(row: dict, side: str) -> str:
    least, most = row[f"{side}_range"]
    return f"{row[side]:.2f} ({least:.2f}-{most:.2f})"


def draw(row: dict, path: str) -> None:
    """Seconds of each turn over the tokens before it."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(5.6, 3.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for name, key, colour in (("ours", "ours_turns", COLOURS[0]), ("TRL's loop with generate", "peer_turns",
                                                                   COLOURS[1])):
        axes.plot(row["histories"], row[key], "o-", color=colour, markersize=4, label=name)
    axes.set_xlabel("tokens before the turn, which says 24 after 48 added ones", fontsize=8)
    axes.set_ylabel("seconds of the turn", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=8)
    axes.grid(visible=True, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)


BARRIER, TRL = "the same engine, a barrier per turn", "TRL GRPOTrainer, generate"
SLEEPS = "tools of 0 to 500 ms"
CASES = {
    "ragged_barrier": Case(f"32 episodes of 3 ragged turns, {SLEEPS}", BARRIER, 1.5),
    "ragged_trl": Case(f"32 episodes of 3 ragged turns, {SLEEPS}", TRL, 5),
    "even_barrier": Case(f"32 episodes of 3 equal turns, {SLEEPS}", BARRIER),
    "instant_barrier": Case("32 episodes of 3 ragged turns, instant tools", BARRIER),
    "instant_trl": Case("32 episodes of 3 ragged turns, instant tools", TRL),
    "history": Case("the last of 12 turns, 24 tokens each and 48 added", TRL),
}
WORKS = ["ragged", "even", "instant", "history"]


def rows_of(options: argparse.Namespace) -> Iterator[dict]:
    for work in options.works:
        yield from rows_of_history(options) if work == "history" else rows_of_work(options, work)


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.add_clock(harness.parser_of(__doc__, repeats=5))
    parser.add_argument("--works", nargs="+", choices=WORKS, default=WORKS)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama4m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--page", type=Path, help="put the tables into this file")
    parser.add_argument("--image", help="draw the turns' seconds into this file")
    options = harness.parse(parser, argv)
    keep_freed_blocks()  # as the launcher does; the peer profits as well
    with tempfile.TemporaryDirectory() as folder:
        options.place = Path(folder)
        rows = write_rows(rows_of(options), options.json)
    if options.page:
        write_tables(options.page, *tables_of(rows))
    if options.image:
        draw(next(row for row in rows if row["case"] == "history"), options.image)


if __name__ == "__main__":
    main()
