"""The rollout benchmark: its floor by hand, its turns with a peer process, and what it says where there is no peer."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from types import SimpleNamespace

import pytest
import rollout
import rollout_floor
import rollout_llama
import torch
from rollout_floor import Requests

from tests.factories.tiny import tiny_causal_lm


def test_the_floor_counts_prompts_steps_and_columns(monkeypatch):
    requests = Requests(tiny_causal_lm(), [[3, 4, 5], [6, 7, 8, 9, 10]], [2, 4], 2)
    engine = rollout.engine_for(requests)
    rollout.by_engine(engine, requests)
    each = 2 * 2 * 2 * 8 * 4  # bytes of a column: 2 layers, keys and values, 2 heads of 8 numbers in fp32
    assert engine.kv_bytes == 2 * 9 * each  # both slots hold the longest request
    asked = []

    def products(_engine, rows, is_own, has_head=True):
        asked.append((rows, has_head))
        if rows == 1:
            return lambda: 1.5 if is_own else 1.25
        return lambda: (2.0 if is_own else 3.0) if has_head else (6.0 if is_own else 5.0)

    monkeypatch.setattr(rollout_floor, "products", products)
    monkeypatch.setattr(rollout_floor, "bandwidth", lambda size: 100.0)
    floor = rollout_floor.floor_of(engine, requests, 1)
    assert set(asked) == {(2, True), (1, True), (6, False)}  # all tokens of the prompts but their last ones
    assert (floor.step_torch, floor.step_own, floor.prompts) == (3.0, 2.0, 5.0)
    assert floor.products == 2 * 2.0 + 2 * 1.25  # two steps of both, and two of what is left of the longer one
    columns = (3 + 4) + (5 + 6 + 7 + 8)  # what each token looks at, itself included
    assert floor.cache == pytest.approx(columns * each / 100.0)
    assert floor.whole == floor.prompts + floor.products + floor.cache


FAKE = """
    import json, sys
    asked = json.loads(sys.stdin.readline())
    print("a peer with", asked["threads"], asked["cache"], asked["ubatch"], flush=True)
    for _ in sys.stdin:
        tokens = [[7] * asked["response"] for _ in asked["prompts"]]
        tokens[1][2] = 8
        print(json.dumps({"prompt": 0.5, "decode": 2.0, "tokens": tokens}), flush=True)
"""


def test_turns_with_the_peer_count_first_tokens_apart(tmp_path, monkeypatch):
    (tmp_path / "peer.py").write_text(textwrap.dedent(FAKE))
    monkeypatch.setattr(rollout_llama, "PEER", tmp_path / "peer.py")
    monkeypatch.setattr(rollout_llama, "write_model", lambda model, folder: folder / "model.gguf")
    drawn = []
    work = rollout_llama.Work(None, [[1, 2], [3, 4]], 4, lambda n: drawn.append(n) or [[7] * n] * 2)
    monkeypatch.setattr(rollout_llama, "seconds", lambda act: (act(), 0.25 if drawn[-1] == 1 else 1.25)[1])
    sides = rollout_llama.beside_llama(work, 2, sys.executable, "bf16")
    assert drawn == [1, 4] * 3  # one unmeasured turn
    assert sides.ours == {"prompt": [0.25] * 2, "decode": [1.0] * 2}
    assert sides.peer == {"prompt": [0.5] * 2, "decode": [2.0] * 2}
    assert sides.equal == 6 / 8  # the second sequence counts up to where it departs
    assert sides.peer_is == f"a peer with {torch.get_num_threads()} bf16 4"


def test_without_the_peer_one_line_says_so_and_nothing_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(rollout_llama, "is_installed", lambda python: False)
    options = SimpleNamespace(peer_python="a python", cases=["llama_cpp"])
    assert list(rollout.rows_of(options)) == []
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
def test_greedy_tokens_are_llama_cpps():
    model = tiny_causal_lm(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
    requests = Requests(model, [[5, 9, 11, 40], [6, 30, 7, 8]], [8] * 2, 2)
    engine = rollout.engine_for(requests)
    work = rollout_llama.Work(model, requests.prompts, 8, lambda n: rollout.by_engine(
        engine, requests._replace(limits=[n] * 2), 0.0))
    assert rollout_llama.check_same(work, sys.executable) == 1
