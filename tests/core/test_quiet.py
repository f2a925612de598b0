"""The first screen is the run's own: libraries' notes to programmers are not on it, real warnings are."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from hybrid_rlhf.core.startup import quiet_libraries
from hybrid_rlhf.models import load
from hybrid_rlhf.models.load import ModelConfig
from tests.factories.tiny import save_tiny, tiny_causal_lm

ROOT = Path(__file__).resolve().parents[2]


def warned(kind, module, text="old") -> bool:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quiet_libraries()
        warnings.warn_explicit(text, kind, f"{module}.py", 1, module=module)
    return bool(seen)


def test_deprecations_inside_of_libraries_are_silent_and_every_other_warning_is_not(monkeypatch):
    monkeypatch.setattr(sys, "warnoptions", [])
    assert not warned(FutureWarning, "transformers.modeling_utils")
    assert not warned(DeprecationWarning, "torch.jit._script")
    assert warned(UserWarning, "transformers.modeling_utils")
    assert warned(FutureWarning, "torchy.mine") and warned(DeprecationWarning, "my_rewards")
    assert not warned(UserWarning, "peft.tuners.lora.layer", "fan_in_fan_out is set to False but it is x")


def test_a_filter_that_python_was_given_stands(monkeypatch):
    monkeypatch.setattr(sys, "warnoptions", ["always"])
    assert warned(FutureWarning, "transformers.modeling_utils")


def test_deepspeed_does_not_say_that_there_is_no_accelerator_and_says_the_rest(caplog):
    quiet_libraries()
    logger = logging.getLogger("DeepSpeed")
    caplog.set_level(logging.WARNING, logger="DeepSpeed")  # an earlier test may have run it at another
    logger.addHandler(caplog.handler)
    logger.warning("Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.")
    logger.warning("something is wrong")
    logger.removeHandler(caplog.handler)
    assert [r.getMessage() for r in caplog.records if r.name == "DeepSpeed"] in (["something is wrong"], [
        "something is wrong"] * 2)


def test_growing_a_vocabulary_is_no_lecture(caplog):
    from transformers.utils import logging as theirs

    theirs.warning_once.cache_clear()
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        model = load.prepare(tiny_causal_lm(), ModelConfig(), 310)
    finally:
        logger.removeHandler(caplog.handler)
    assert model.get_input_embeddings().num_embeddings == 310
    assert caplog.text == ""


@pytest.mark.slow
def test_what_a_run_with_adapters_says_is_its_own(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(
        json.dumps({"prompt": f"What is {i}?", "completion": f"It is {i}."}) for i in range(40)))
    base = save_tiny(tmp_path / "base", template=False)  # grows by the markers of turns
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", "--stage", "sft", "--model.model_name_or_path", base,
         "--data.sources", "[{path: rows.jsonl}]", "--data.max_length", "64", "--model.lora.r", "4",
         "--train.max_steps", "2", "--output_dir", "out"], cwd=tmp_path, capture_output=True, text=True, check=False,
        timeout=600, env={k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"})
    assert done.returncode == 0, done.stderr
    for word in ("Warning", "warnings.warn", "mean_resizing", "bitsandbytes", "[INFO]", "[WARNING]", "Setting ds_"):
        assert word not in done.stdout + done.stderr
