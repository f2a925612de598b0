"""A sample of `make architectures`, with every path and every kind of layer, compared with its page."""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict, replace
from pathlib import Path

import architecture_sweep
import pytest
import torch
import transformers
from architecture_sweep import Row, read_rows, worse

from hybrid_rlhf.engine.decode import runner
from hybrid_rlhf.kernels import REFERENCE, ops_for
from hybrid_rlhf.roles import policy_module

# one type of each mechanism: whole layers in a call, caps, packed and latent attention, chunks, experts, sinks, states
WHOLE = ("llama", "opt")
NATIVE = ("smollm3", "gemma2", "phi3", "opt:post_norm", "llama4_text", "deepseek_v2", "gpt_oss", "mamba2", "lfm2",
          "qwen3_next", "zamba2")
OTHERS = {"falcon:alibi": "eager", "recurrent_gemma": "generate", "rwkv": "generate"}

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"
PAGE = (RESULTS / "architectures.md").read_text(encoding="utf-8")
PUBLISHED = read_rows(RESULTS / "architectures.json")
FURTHER = random.Random(20).sample(sorted(name for name, row in PUBLISHED.items() if row.path == "native"), 3)
NATIVE_ROW = Row("llama", "native", difference=1e-6, tokens="generate", layers=2, cache_bytes=64,
                 control={"mask": True, "positions": True, "states": False}, trains="yes")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WHOLE, *NATIVE, *OTHERS, *FURTHER])
def test_a_type_is_as_right_as_the_page_says_and_a_fault_is_noticed(name, monkeypatch):
    monkeypatch.setattr(runner, "ops_for", runner.ops_for)  # the sweep sets it
    row = architecture_sweep.examine(name)
    assert row.path == OTHERS.get(name, "native"), row.reason
    assert not row.is_wrong, row
    # RecurrentGemma's own generate does not give what its forward says; ours does
    assert row.tokens == ("plain forward" if name == "recurrent_gemma" else "generate")
    assert row.trains == "yes" and row.gradient < 1e-4
    assert not row.is_on_slots or any(row.control.values())
    if ops_for("cpu").decode_attention is not REFERENCE.decode_attention:
        assert row.layers == 2 or name not in WHOLE
        if f"| transformers | {transformers.__version__} |" in PAGE:
            assert worse(row, PUBLISHED[name]) == []


def test_the_page_has_a_row_for_every_type_that_was_examined():
    rows = re.findall(r"^\| (\S+) \| (native|eager|generate|refused|failed) \| ", PAGE, re.MULTILINE)
    assert rows == [(row.type, row.path) for row in PUBLISHED.values()]
    assert f"| rows | {len(rows)} |" in PAGE and len(rows) >= 195


def test_a_step_that_takes_another_gradient_than_plain_torch_s_is_told(monkeypatch):
    model = architecture_sweep.tiny_model("llama")
    states = policy_module.hidden_states
    for shift, said in ((0.0, "yes"), (0.1, "wrong: loss ")):
        row = Row("llama", "native", difference=0.0, tokens="generate")
        monkeypatch.setattr(policy_module, "hidden_states", lambda *a, shift=shift: states(*a) + shift)
        monkeypatch.setattr(policy_module.PolicyModule, "can_share", lambda _self: False)
        architecture_sweep.train(row, model)
        assert row.trains.startswith(said) and row.is_wrong == (shift > 0)
    monkeypatch.setattr(model.model, "forward", lambda *_a, **_b: 1 / 0)
    architecture_sweep.train(row, model)
    assert row.trains == "wrong: ZeroDivisionError: division by zero" and row.is_wrong


@pytest.mark.parametrize(("changed", "loss"), [
    (dict(trains="wrong: loss 3"), "trained before: wrong: loss 3"),
    (dict(path="eager", reason="native: its mask"), "path native -> eager: native: its mask"),
    (dict(path="failed", reason="no answer"), "path native -> failed: no answer"),
    (dict(tokens="plain forward (generate raises it)"), "tokens equal generate -> plain forward (generate raises it)"),
    (dict(difference=1e-3), "wrong: difference 0.001, tokens generate"),
    (dict(layers=0), "whole layers 2 -> 0"),
    (dict(control={"mask": False, "positions": True, "states": True}), "no longer noticed when broken: mask"),
])
def test_a_worse_outcome_is_named(changed, loss):
    assert loss in worse(replace(NATIVE_ROW, **changed), NATIVE_ROW)


def test_rounding_time_and_a_refused_type_that_runs_now_are_no_worse():
    assert worse(replace(NATIVE_ROW, difference=9e-6, seconds=30.0, cache_bytes=128), NATIVE_ROW) == []
    assert worse(NATIVE_ROW, Row("llama", "refused", "no cache")) == []


def test_the_sweep_fails_and_names_the_type_that_came_out_worse_than_before(tmp_path, monkeypatch, capsys):
    before = tmp_path / "before.json"
    before.write_text(json.dumps([asdict(NATIVE_ROW)]), encoding="utf-8")
    monkeypatch.setattr(architecture_sweep, "run_forked",
                        lambda _examine, name, limit: (replace(NATIVE_ROW, type=name, layers=0), ""))
    threads, level = torch.get_num_threads(), transformers.logging.get_verbosity()
    try:
        assert architecture_sweep.main(["--only", "llama", "opt", "--against", str(before)]) == 1
    finally:
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity(level)
    assert "worse than before: llama: whole layers 2 -> 0\n" in capsys.readouterr().out
