"""A start: what it does not import, and that it leaves Python's collector as it found it."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from hybrid_rlhf.cli import main
from hybrid_rlhf.core.startup import quiet_libraries
from hybrid_rlhf.data import datasets
from hybrid_rlhf.trainers import sft
from tests.factories.tiny import save_tiny

# What help, a plan, an answer and a first step of SFT must not import; one after the other in one process.
NEVER = {"datasets", "pandas", "pyarrow", "sklearn", "scipy", "matplotlib", "tensorboard", "bitsandbytes", "trl",
         "peft"}
STARTS = {"help": NEVER | {"transformers", "deepspeed", "accelerate", "torch._dynamo"},
          "plan": {"deepspeed", "datasets", "peft", "matplotlib"},
          "answer": NEVER | {"deepspeed", "fastapi", "uvicorn"}, "step": NEVER}
PROGRAM = """
import json, sys
from contextlib import suppress
from hybrid_rlhf.cli import main
found, words = {}, sys.argv[1:]
def note(name):
    found[name] = sorted(sys.modules)
with suppress(SystemExit):
    main(["--stage", "sft", "--help"])
note("help")
codes = [main([*words, "--plan"])]
note("plan")
codes.append(main(["chat", "--model", words[3], "--prompt", "red", "--max_new_tokens", "2"]))
note("answer")
from hybrid_rlhf.run import reporter
conclude = reporter.Reporter.conclude
reporter.Reporter.conclude = lambda self: (note("step"), conclude(self))[1]
print(json.dumps([codes + [main(words)], found]))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    save_tiny(folder / "model")
    rows = [{"prompt": f"What is {i}?", "completion": f" It is {i}."} for i in range(30)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def words_of(place, out: str) -> list[str]:
    """One step of SFT; the fourth word is the model."""
    return ["--stage", "sft", "--model.model_name_or_path", str(place / "model"), "--data.sources",
            json.dumps([{"path": str(place / "rows.jsonl")}]), "--data.split", "null", "--data.max_length", "32",
            "--train.max_steps", "1", "--data.cache_dir", str(place / "cache"), "--output_dir", str(place / out)]


@pytest.mark.slow
def test_each_start_imports_what_it_needs_alone(place):
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words_of(place, "run"), "--report_to", "[]"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    codes, found = json.loads(done.stdout.splitlines()[-1])
    assert codes == [0, 0, 0]
    assert not {start: more for start, never in STARTS.items() if (more := never & set(found[start]))}


def test_pythons_collector_rests_while_a_run_starts_and_works_as_ever_from_the_first_step_on(place, monkeypatch):
    usual, seen = gc.get_threshold(), []
    step, build = sft.SFTTrainer.step, datasets.build

    def watched(function):
        def call(*given, **named):
            seen.append(gc.get_threshold())
            return function(*given, **named)
        return call

    monkeypatch.setattr(datasets, "build", watched(build))
    monkeypatch.setattr(sft.SFTTrainer, "step", watched(step))
    assert main(words_of(place, "again")) == 0
    assert seen[0][0] > 10 * usual[0]
    assert set(seen[1:]) == {usual}  # a step may be rehearsed before the first
    assert main(["--stage", "sft", "--output_dir", str(place / "none")]) == 2
    assert gc.get_threshold() == usual


# -- the first screen is the run's own: libraries' notes to programmers are not on it, real warnings are --------------


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
