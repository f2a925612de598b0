"""A sample of `make architectures`, with every path and every kind of layer: run after each change of the engine, and
compared with what docs/results/architectures.json says of all types.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
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

WHOLE = ("llama", "mistral", "qwen2", "qwen3", "cwm", "opt")
NATIVE = ("gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt:post_norm", "olmo2", "cohere2", "smollm3",
          "llama4_text", "deepseek_v2", "longcat_flash", "glm4_moe", "mixtral", "qwen3_moe", "gpt_oss", "mamba",
          "mamba2", "jamba", "lfm2", "qwen3_next", "falcon_h1", "zamba2")
OTHERS = {"bloom": "eager", "falcon:alibi": "eager", "doge": "eager", "recurrent_gemma": "generate", "rwkv": "generate"}

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"
PUBLISHED = read_rows(RESULTS / "architectures.json")
# of the types above those with code of their own (whole layers, alibi, latent attention, states), and some of the rest
FAMILIES = ("llama", "falcon:alibi", "deepseek_v2", "mamba2")
SAMPLE = (*FAMILIES, *random.Random(20).sample(sorted(PUBLISHED.keys() - {*WHOLE, *NATIVE, *OTHERS}), 8))
NATIVE_ROW = Row("llama", "native", difference=1e-6, tokens="generate", layers=2, cache_bytes=64,
                 control={"mask": True, "positions": True, "states": False}, trains="yes")


@pytest.fixture(scope="module")
def sweep():
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    yield architecture_sweep
    transformers.logging.set_verbosity(level)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WHOLE, *NATIVE, *OTHERS])
def test_a_type_generates_what_its_plain_forward_says_and_a_fault_is_noticed(sweep, name, monkeypatch):
    monkeypatch.setattr(runner, "ops_for", runner.ops_for)  # the sweep sets it
    row = sweep.examine(name)
    assert row.path == OTHERS.get(name, "native"), row.reason
    assert not row.is_wrong, row
    # RecurrentGemma's own generate does not give what its forward says; ours does
    assert row.tokens == ("plain forward" if name == "recurrent_gemma" else "generate")
    assert row.trains == "yes" and row.gradient < 1e-4
    assert not row.is_on_slots or any(row.control.values())
    if ops_for("cpu").decode_attention is not REFERENCE.decode_attention:
        assert (row.layers == 2) == (name in WHOLE)


@pytest.mark.slow
def test_no_type_of_a_sample_comes_out_worse_than_the_page_says():
    page = (RESULTS / "architectures.md").read_text(encoding="utf-8")
    made_with = re.search(r"^\| transformers \| (\S+) \|$", page, re.MULTILINE).group(1)
    if made_with != transformers.__version__:
        pytest.skip(f"the page was made with transformers {made_with}, and this is {transformers.__version__}")
    if ops_for("cpu").decode_attention is REFERENCE.decode_attention:
        pytest.skip("the page was made with the compiled kernels, which are not to be had here")
    outcome = subprocess.run([sys.executable, architecture_sweep.__file__, "--limit", "120", "--only", *SAMPLE,
                              "--against", str(RESULTS / "architectures.json")], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert f"rows {len(SAMPLE)}," in outcome.stdout


def test_the_page_has_a_row_for_every_type_that_was_examined():
    page = (RESULTS / "architectures.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+) \| (native|eager|generate|refused|failed) \| ", page, re.MULTILINE)
    assert rows == [(row.type, row.path) for row in PUBLISHED.values()]
    assert f"| rows | {len(rows)} |" in page and len(rows) >= 195


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


def test_rounding_and_time_make_no_outcome_worse():
    assert worse(replace(NATIVE_ROW, difference=9e-6, seconds=30.0, cache_bytes=128), NATIVE_ROW) == []


def test_a_refused_type_that_runs_now_is_no_worse():
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
