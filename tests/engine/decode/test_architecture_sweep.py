"""A sample of `make architectures`, with every path and every kind of layer: run after each change of the engine."""

from __future__ import annotations

import architecture_sweep
import pytest
import transformers

from hybrid_rlhf.engine.decode import runner
from hybrid_rlhf.kernels import REFERENCE, ops_for

WHOLE = ("llama", "mistral", "qwen2", "qwen3", "cwm")
NATIVE = ("gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "olmo2", "cohere2", "smollm3", "llama4_text",
          "deepseek_v2", "longcat_flash", "glm4_moe", "mixtral", "qwen3_moe", "gpt_oss", "mamba", "mamba2", "jamba",
          "lfm2", "qwen3_next", "falcon_h1", "zamba2")
OTHERS = {"bloom": "eager", "falcon:alibi": "eager", "recurrent_gemma": "generate", "rwkv": "generate"}


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
    assert not row.is_on_slots or any(row.control.values())
    if ops_for("cpu").decode_attention is not REFERENCE.decode_attention:
        assert (row.layers == 2) == (name in WHOLE)
