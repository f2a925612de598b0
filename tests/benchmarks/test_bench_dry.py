"""Every benchmark runs dry at tiny sizes, so that what was renamed since the last measurement is noticed here.

Most run our sides in this process; a peer that needs one of its own, or comes before any process group, has the last.
"""

from __future__ import annotations

import json
import subprocess
import sys

import card
import cards
import episodes
import grpo_step
import harness
import memory
import offline_step
import pages
import ppo_step
import pytest
import ragged_memory
import reward_step
import rollout
import sft_step
import steps
import time_left
import torch

pytestmark = pytest.mark.slow


class Peer:
    """In the place of one that is in another process or needs to come first."""

    versions, peak = {"torch": "2"}, 7

    def __init__(self, *_settings: object, **_named: object) -> None:
        self.num_steps = 0

    def step(self) -> None:
        self.num_steps += 1

    def rows(self, step: int) -> list[list[int]]:
        return [[3 + step, 4, 5, 6], [7, 8]]

    def close(self) -> None:
        self.num_steps = -1


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    """Dry runs change neither malloc nor the threads of the other tests."""
    for module in (steps, sft_step):
        monkeypatch.setattr(module, "keep_freed_blocks", lambda: True)
    monkeypatch.setattr(memory, "give_back_freed_blocks", lambda: True)
    monkeypatch.setattr(harness.measuring, "block", harness.measuring.block)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def rows_of(module, tmp_path, *words: str) -> dict[str, dict]:
    """A quick run's rows by their case."""
    module.main(["--quick", "--json", str(tmp_path / "rows.json"), *words])
    return {row["case"]: row for row in json.loads((tmp_path / "rows.json").read_text())}


def test_ppo_steps_beside_the_plain_one(tmp_path) -> None:
    rows = rows_of(ppo_step, tmp_path, "--cases", "full", "ragged_lora")
    assert list(rows) == ["full", "ragged_lora"]
    for row in rows.values():
        assert row["ratio"] == row["peer"] / row["ours"] and row["floor_ratio"] > 0
        assert {"time/generate", "time/score", "time/train"} <= row["phases"].keys()


def test_grpo_steps(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(grpo_step, "TrlGRPO", Peer)
    rows = rows_of(grpo_step, tmp_path)
    assert list(rows) == list(grpo_step.CASES)
    assert rows["rloo"]["beside"] == "TRL RLOOTrainer" and rows["rloo"]["response_tokens"] == 2 * 2 * 16
    assert rows["ragged"]["response_tokens"] < 2 * 2 * 16
    assert all(row["floor_ratio_shared"] > 0 for row in rows.values())


def test_sft_steps_and_their_memory(tmp_path, monkeypatch) -> None:
    def held(function, side: str, **settings: object) -> dict:
        return function(side=side, **settings) if side == "ours" else {"idle": 1, "peak": 10**10}

    monkeypatch.setattr(sft_step, "TrlSFT", Peer)
    monkeypatch.setattr(sft_step, "run_apart", held)
    rows = rows_of(sft_step, tmp_path, "--cases", *sft_step.CASES, "--micro_batch_tokens", "768")
    assert list(rows) == ["packed", "memory"]
    assert rows["packed"]["tokens"] == 6 and rows["packed"]["unit"] == "tokens/s"
    assert 10**8 < 1e6 * rows["memory"]["ours"] == pytest.approx(rows["memory"]["sides"]["ours"]["peak"])


def test_reward_steps(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(reward_step, "TrlReward", Peer)
    row = rows_of(reward_step, tmp_path)["pairs"]
    assert row["padded_tokens"] > row["tokens"] > row["different_tokens"] > 0
    assert row["floor_ratio_shared"] > 0


def test_steps_whose_peer_is_in_its_own_process(tmp_path, monkeypatch) -> None:
    peers = []
    monkeypatch.setattr(offline_step, "PeerProcess", lambda *settings: peers.append(Peer()) or peers[-1])
    rows = rows_of(offline_step, tmp_path)
    assert list(rows) == ["dpo", "sft_lora"]
    assert rows["dpo"]["peer_runs_on"] == {"torch": "2"} and rows["dpo"]["peer_peak"] == 7
    assert [peer.num_steps for peer in peers] == [-1, -1]  # ended


def test_episodes_say_what_is_written_on_all_sides(tmp_path) -> None:
    """In full: TRL's own loop is in it, and each side's tokens are compared before anything is measured."""
    pytest.importorskip("trl")
    page = tmp_path / "episodes.md"
    rows = rows_of(episodes, tmp_path, "--page", str(page))
    assert list(rows) == list(episodes.CASES)
    assert rows["ragged_trl"]["ours"] == rows["ragged_barrier"]["ours"] and rows["ragged_trl"]["calls"] == 2 * 4 * 2
    assert rows["instant_trl"]["slept"] == 0 < rows["even_barrier"]["slept"]
    assert page.read_text().count("| TRL GRPOTrainer") == 2


def test_memory_of_generating_and_of_ppo(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(memory, "run_apart", lambda function, **settings: function(**settings))
    rows = rows_of(memory, tmp_path, "--cases", "generation", "ppo")
    assert list(rows) == ["generation", "ppo"]
    assert set(rows["ppo"]["must_hold_mb"]) == {"base", "kv", "activations"}
    assert rows["ppo"]["planned_mb"] > 0 and "actor/update" in rows["ppo"]["phases_mb"]


def test_memory_over_rows_of_unequal_lengths(tmp_path, monkeypatch) -> None:
    def peak(function, environment: dict | None = None, **settings: object) -> list[int]:
        """Ours in this process; TRL's and an environment of its own in none."""
        return [10**9] if environment or function is ragged_memory.trl else function(**settings)

    monkeypatch.setattr(ragged_memory, "run_apart", peak)
    monkeypatch.setattr("hybrid_rlhf.core.memory.keep_freed_blocks", lambda: True)
    monkeypatch.setattr("hybrid_rlhf.core.memory.bound_product_caches", lambda: None)
    page = tmp_path / "ragged_memory.md"
    rows = rows_of(ragged_memory, tmp_path, "--cases", "products", "sft_fp32", "ppo_bf16", "--page", str(page))
    assert rows["sft_fp32"]["steps"] == 3 and rows["sft_fp32"]["peer"] == 1000 and rows["ppo_bf16"]["peer"] is None
    assert all(10**7 < 1e6 * row["ours"] < 10**11 for row in rows.values())
    assert page.read_text().count("TRL SFTTrainer") == 1


def test_rollouts_beside_transformers(tmp_path) -> None:
    rows = rows_of(rollout, tmp_path, "--cases", "stories3M", "ragged", "fixed_batch")
    assert list(rows) == ["stories3M", "ragged", "fixed_batch"]
    for row in rows.values():
        assert row["ours"] > 0 and row["floor_ratio"] > 0 and row["engine"]["path"] == "native"


def test_pages_beside_whole_slots(tmp_path) -> None:
    rows = rows_of(pages, tmp_path)
    assert list(rows) == ["3M", "134M"]
    assert all(0 < row["memory_ratio"] < 0.6 and row["ours"] > 0 for row in rows.values())


def test_decoding_on_a_card(tmp_path) -> None:
    rows = rows_of(card, tmp_path)
    assert list(rows) == list(card.CASES) and "ratio" in rows["opt-8"] and "ratio" not in rows["llama8-16-nf4"]
    for row in rows.values():
        assert row["tokens_per_second"] > 0 and row["engine"]["path"] == "native"


def test_the_table_of_cards(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cards, "SHAPES", ["0.5B"])
    monkeypatch.setattr(cards, "WAYS", {"qlora": cards.WAYS["qlora"]})
    cards.main(["--quick", "--json", str(tmp_path / "cards.json"), "--page", str(tmp_path / "cards.md")])
    row, = json.loads((tmp_path / "cards.json").read_text())
    assert (row["card_gib"], row["way"], row["shape"]) == (8, "qlora", "0.5B")
    assert f"| 8 GiB | 0.5B ({row['micro_batch_tokens']}; " in (tmp_path / "cards.md").read_text()


def test_seconds_that_a_run_says_are_left_beside_real_ones(tmp_path) -> None:
    row = rows_of(time_left, tmp_path, "--models", "tiny", "--stages", "sft", "--page",
                  str(tmp_path / "time_left.md"))["tiny sft"]
    assert all(row[at]["said"] > 0 and row[at]["real"] > 0 for at in ("before", "after10"))
    assert row["ratios"]["before"] == row["before"]["said"] / row["before"]["real"]
    assert "| tiny | sft | 11 |" in (tmp_path / "time_left.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_needs_other_processes_and_peers_of_its_own(tmp_path) -> None:
    """As `make bench BENCH_ARGS=--quick`, without what the tests above run whole."""
    names = "grpo_step", "sft_step", "reward_step", "offline_step", "startup", "server"
    done = subprocess.run([sys.executable, "benchmarks/bench.py", "--quick", "--only", *names], cwd=harness.ROOT,
                          env=harness.ENVIRONMENT)
    assert done.returncode == 0
    page = tmp_path / "architectures.md"
    command = [sys.executable, "benchmarks/architecture_sweep.py", "--quick", "--page", str(page)]
    assert subprocess.run(command, cwd=harness.ROOT, env=harness.ENVIRONMENT).returncode == 0
    assert page.read_text().count("| llama |") == 1
