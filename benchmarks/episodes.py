"""Episodes of several turns with tools: ours beside the same engine with a barrier per turn, and beside TRL's loop.

    python benchmarks/episodes.py [--works ragged even instant] [--json FILE] [--page FILE]

32 episodes of 3 turns, 4 prompts with 8 samples each; between two turns a tool is called that sleeps 0 to 500 ms, drawn
once, and 48 tokens are added. A turn is a call (21 tokens; the last turn calls nothing) and a thought: of 24 tokens in
`even`; of lengths drawn once from a geometric law with mean 24, at most 128, in `ragged`; `instant` is `ragged` with
tools that answer at once. All sides alternate, after a round that is not measured: ours, which waits for nobody; the
same engine, where all turns of a round are sampled, all tools awaited side by side, then the next round begins
(peers/turn_barrier.py); and TRL's GRPOTrainer until its episodes are there, with transformers' generate
(peers/trl_episodes.py), which calls one tool after the other and reads the whole history again for each turn. The model
is random; what it draws is replaced by what is written down when a turn has its length, on all sides, so all say the
same tokens, or nothing is measured. Single-turn generation: rollout.py.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import harness
import torch
from episode_talk import CALL_TOKENS, Place, Talk, WrittenTurns, write
from harness import Case, Times, seconds, sizes_of, table_of, timed_row, write_rows, write_tables
from peers.trl_episodes import TrlEpisodes
from peers.turn_barrier import BarrierPool, BarrierTurns
from random_models import SHAPES, ragged_limits
from torch import nn

from hybrid_rlhf.core.memory import keep_freed_blocks
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.environments.calls import CallPool
from hybrid_rlhf.environments.open import EnvironmentConfig
from hybrid_rlhf.rollout import episodes as player

PROMPTS, GROUP, ADDED, LONGEST = 4, 8, 48, 0.5
THOUGHT, MOST = 24, 128  # tokens of a turn beside its call


class Ours:
    """play() plays all episodes of a talk; with a barrier per turn .ended says when each round was sampled.

    .tokens: each response. The clock is time.perf_counter.
    """

    def __init__(self, talk: Talk, model: nn.Module) -> None:
        self.talk, self.engine = talk, HybridEngine.for_inference(model, talk.tokenizer)
        self.engine.eos_ids = []  # lengths are the benchmark's
        self._open_turns = self.engine.open_turns
        config = EnvironmentConfig(factory="place", num_workers=len(talk.rows), max_turns=100)
        # a player keeps its pool of calls, so the barrier has a player of its own
        self.player, self.stopping = (player.EpisodePlayer(talk.environments, config, talk.tokenizer) for _ in "12")
        self.tokens: list[list[int]] = []
        self.ended: list[float] = []

    def play(self) -> None:
        self._play(self.player, self._written)

    def play_with_barrier(self) -> None:
        def open_turns(*given: object) -> BarrierTurns:
            turns = BarrierTurns(self._written(*given))
            self.ended = turns.ended
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


# -- the page ----------------------------------------------------------------------------------------------------------


def tables_of(rows: list[dict]) -> list[str]:
    """A line for each work and peer."""
    whole = [(row["work"], row["beside"], ranged(row, "ours"), ranged(row, "peer"),
              f"{row['ratio']:.2f} ({row['ratio_range'][0]:.2f}-{row['ratio_range'][1]:.2f})", row["asked"])
             for row in rows]
    return [table_of(("work", "beside", "ours, s", "peer's, s", "ratio", "asked"), whole)]


def ranged(row: dict, side: str) -> str:
    least, most = row[f"{side}_range"]
    return f"{row[side]:.2f} ({least:.2f}-{most:.2f})"


BARRIER, TRL = "the same engine, a barrier per turn", "TRL GRPOTrainer, generate"
SLEEPS = "tools of 0 to 500 ms"
CASES = {
    "ragged_barrier": Case(f"32 episodes of 3 ragged turns, {SLEEPS}", BARRIER, 1.5),
    "ragged_trl": Case(f"32 episodes of 3 ragged turns, {SLEEPS}", TRL, 5),
    "even_barrier": Case(f"32 episodes of 3 equal turns, {SLEEPS}", BARRIER),
    "instant_barrier": Case("32 episodes of 3 ragged turns, instant tools", BARRIER),
    "instant_trl": Case("32 episodes of 3 ragged turns, instant tools", TRL),
}
WORKS = ["ragged", "even", "instant"]


def rows_of(options: argparse.Namespace) -> Iterator[dict]:
    for work in options.works:
        yield from rows_of_work(options, work)


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.add_clock(harness.parser_of(__doc__, repeats=5))
    parser.add_argument("--works", nargs="+", choices=WORKS, default=WORKS)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama4m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--page", type=Path, help="put the tables into this file")
    options = harness.parse(parser, argv)
    keep_freed_blocks()  # as the launcher does; the peer profits as well
    with tempfile.TemporaryDirectory() as folder:
        options.place = Path(folder)
        rows = write_rows(rows_of(options), options.json)
    if options.page:
        write_tables(options.page, *tables_of(rows))


if __name__ == "__main__":
    main()
