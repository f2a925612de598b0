"""A start: what it does not import, and that it leaves Python's collector as it found it."""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import pytest

from hybrid_rlhf.cli import main
from hybrid_rlhf.data import datasets
from hybrid_rlhf.trainers import sft
from tests.factories.tiny import save_tiny

# Only drawn, tabulated, asked of the hub or measured by others: not one of them is needed for a first step.
NEVER = ("datasets", "pandas", "pyarrow", "sklearn", "scipy", "matplotlib", "tensorboard", "bitsandbytes", "trl",
         "peft")
MODELS = ("transformers", "deepspeed", "accelerate")
PROGRAM = """
import sys
from hybrid_rlhf.cli import main
from hybrid_rlhf.run import reporter
conclude = reporter.Reporter.conclude
def told(self):
    print("at the end of the last step:", [m for m in {never} if m in sys.modules])
    conclude(self)
reporter.Reporter.conclude = told
code = main(sys.argv[1:])
print("at the end:", [m for m in {never} if m in sys.modules], code)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    save_tiny(folder / "model")
    rows = [{"prompt": f"What is {i}?", "completion": f" It is {i}."} for i in range(30)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def said(program: str, never: tuple[str, ...], *argv: str, given: str = "") -> list[str]:
    done = subprocess.run([sys.executable, "-c", program.replace("{never}", repr(never)), *argv], capture_output=True,
                          text=True, input=given)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_first_step_of_sft_needs_no_library_for_tables_plots_or_adapters(place):
    lines = said(PROGRAM, NEVER, "--stage", "sft", "--model.model_name_or_path", str(place / "model"),
                 "--data.sources", json.dumps([{"path": str(place / "rows.jsonl")}]), "--data.split", "null",
                 "--data.max_length", "32", "--train.max_steps", "1", "--report_to", "[]",
                 "--data.cache_dir", str(place / "cache"), "--output_dir", str(place / "run"))
    assert lines[0] == "at the end of the last step: []"
    assert lines[-1].endswith("0")


@pytest.mark.slow
def test_help_imports_no_model_library(place):
    program = """
import sys
from hybrid_rlhf.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    print([m for m in {never} if m in sys.modules])
"""
    assert said(program, (*NEVER, *MODELS, "torch._dynamo"), "--stage", "sft", "--help")[-1] == "[]"


@pytest.mark.slow
def test_an_answer_needs_no_library_for_training_or_data(place):
    program = """
import sys
from hybrid_rlhf.inference.chat.repl import main
print([main(sys.argv[1:])] + [m for m in {never} if m in sys.modules])
"""
    lines = said(program, (*NEVER, "deepspeed", "fastapi", "uvicorn"), "--model", str(place / "model"), "--prompt",
                 "red", "--max_new_tokens", "2")
    assert lines[-1] == "[0]"


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
    assert main(["--stage", "sft", "--model.model_name_or_path", str(place / "model"), "--data.sources",
                 json.dumps([{"path": str(place / "rows.jsonl")}]), "--data.split", "null", "--data.max_length", "32",
                 "--train.max_steps", "1", "--output_dir", str(place / "again")]) == 0
    assert seen[0][0] > 10 * usual[0]
    assert set(seen[1:]) == {usual}  # a step may be rehearsed before the first
    assert main(["--stage", "sft", "--output_dir", str(place / "none")]) == 2
    assert gc.get_threshold() == usual
