"""A stage that is stopped leaves the very model that it had, and goes on to the one that it would have had."""

from __future__ import annotations

import json
import os
import shlex
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rlhf.cli import main
from hybrid_rlhf.core import activity
from hybrid_rlhf.run import runfile
from tests.factories.stage_options import COMMON, WORDS, short_sft, used
from tests.factories.tiny import own_cache, save_tiny


@contextmanager
def interrupted_at(text: str):  # noqa: ANN201
    """Ctrl-C when the process says that it does `text`."""
    with activity.listening(lambda doing: doing == text and os.kill(os.getpid(), signal.SIGINT)):
        yield


def weights(run: str) -> dict[str, torch.Tensor]:
    return load_file(Path(run) / "model" / "model.safetensors")


def are_equal(one: str, other: str) -> bool:
    ours, theirs = weights(one), weights(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_model_of_a_stopped_run_is_that_of_its_step(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*short_sft(tmp_path)[:-4], "--train.lr_scheduler_type", "constant", "--train.warmup_ratio", "0",
             "--train.per_device_train_batch_size", "2", "--train.num_fixed_prompts", "1"]
    for steps in (2, 4):
        assert main([*words, "--train.max_steps", str(steps), "--output_dir", f"straight{steps}"]) == 0
    capsys.readouterr()
    again = [*words, "--train.max_steps", "4", "--output_dir", "run"]
    with interrupted_at("step 2"):
        assert main(again) == 130
    lines = capsys.readouterr().err.splitlines()
    assert lines[-5:-1] == ["stopped after step 2 of 4", "model: run/model (of step 2 of 4)", "report: run/report.html",
                            "checkpoint: run/checkpoints/step-00000002"]
    assert lines[-1].startswith("go on: ") and shlex.split(lines[-1])[-len(again):] == again
    assert are_equal("run", "straight2")
    assert main(again) == 0
    record = runfile.read_run("run")
    assert record.is_finished and are_equal("run", "straight4")
    assert "resuming from run/checkpoints/step-00000002" in record.facts["header"]  # with which the report begins


@pytest.mark.parametrize("text", ["exporting the model", "answering the fixed prompts"])
def test_ctrl_c_at_either_end_of_a_run_says_how_it_goes_on(tmp_path, monkeypatch, capsys, text):
    monkeypatch.chdir(tmp_path)
    words = short_sft(tmp_path)
    with interrupted_at(text):
        assert main(words) == 130
    lines = capsys.readouterr().err.splitlines()
    goes_on = any(line.startswith("go on: ") for line in lines)
    assert goes_on == (text != "exporting the model") != any(line.startswith("next: ") for line in lines)
    assert runfile.read_run("run").is_finished == (text == "exporting the model")
    assert main(words) == 0 and runfile.read_run("run").is_finished


# --- Memory that runs out in any phase of a run ends it in one line that names the phase and what would help

PRESET = "--preset 8gb"
PHASES = [  # stage, what runs out of memory, what the line says
    ("sft", "transformers.AutoModelForCausalLM.from_pretrained", "while loading the model"),
    ("sft", "hybrid_rlhf.engine.train.zero.ZeroTraining._initialize", "while making the optimizer"),
    ("sft", "hybrid_rlhf.engine.train.accumulate.split", "while updating the actor"),
    ("sft", "hybrid_rlhf.training.supervised.export", "while exporting"),
    ("sft", "hybrid_rlhf.run.checkpointing.checkpoint.save", "(saving a checkpoint)"),
    ("grpo", "transformers.AutoModelForCausalLM.from_pretrained", "while loading the model of actor"),
    ("grpo", "hybrid_rlhf.engine.hybrid.Runner.probe", "while generating"),
    ("grpo", "hybrid_rlhf.rollout.old_logprobs.OldLogprobs.logprobs", "while scoring"),
    ("grpo", "hybrid_rlhf.roles.policy_module.PolicyModule.states", "in the actor's"),  # halved until one row is left
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("short")
    (folder / "sft.jsonl").write_text("".join(json.dumps({"prompt": f"say {w}", "response": w}) + "\n" for w in WORDS))
    (folder / "grpo.jsonl").write_text("".join(json.dumps({"prompt": f"say {w}"}) + "\n" for w in WORDS))
    save_tiny(folder / "base")
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        yield folder


@pytest.mark.parametrize(("stage", "target", "phase"), PHASES)
def test_each_phase_ends_in_one_line_and_not_in_a_traceback(place, tmp_path, monkeypatch, capsys, stage, target, phase):
    def run_out(*_given, **_named):
        raise torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported elsewhere")

    monkeypatch.setattr(target, run_out)
    more = ["--reward.functions=[builtin:repetition_penalty]", "--train.max_steps", "1",
            "--ppo.sampling.max_new_tokens", "4", "--train.num_fixed_prompts", "0"] if stage == "grpo" else []
    code = main(["--stage", stage, "--output_dir", str(tmp_path / "run"), *used(stage, COMMON), *more,
                 "--model.model_name_or_path", f"{place}/base",
                 f"--data.sources=[{{path: {place}/{stage}.jsonl}}]"])
    last = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert code == 2 and last.startswith("error: out of memory ") and phase in last, last
    assert ("--plan" in last and PRESET in last) or "in the actor's" in last
