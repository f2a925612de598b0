"""Memory that runs out in any phase of a run ends it in one line that names the phase and what would help."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.cli import main
from tests.factories.stage_options import COMMON, WORDS, used
from tests.factories.tiny import own_cache, save_tiny

PRESET = "--preset 8gb"
PHASES = [  # stage, what runs out of memory, what the line says
    ("sft", "transformers.AutoModelForCausalLM.from_pretrained", "while loading the model"),
    ("sft", "hybrid_rlhf.models.load.complete.check_complete", "while loading the model"),
    ("sft", "hybrid_rlhf.engine.train.zero.ZeroTraining._initialize", "while making the optimizer"),
    ("sft", "hybrid_rlhf.engine.train.accumulate.split", "while updating the actor"),
    ("sft", "hybrid_rlhf.training.supervised.export", "while exporting"),
    ("sft", "hybrid_rlhf.run.checkpointing.checkpoint.save", "(saving a checkpoint)"),
    ("grpo", "transformers.AutoModelForCausalLM.from_pretrained", "while loading the model of actor"),
    ("grpo", "hybrid_rlhf.engine.train.zero.ZeroTraining._initialize", "while making the optimizer of the actor"),
    ("grpo", "hybrid_rlhf.engine.hybrid.Runner.probe", "while generating"),
    ("grpo", "hybrid_rlhf.rollout.old_logprobs.OldLogprobs.logprobs", "while scoring"),
    ("grpo", "hybrid_rlhf.roles.policy_module.hidden_states", "in the actor's"),  # halved until a single row is left
    ("grpo", "hybrid_rlhf.training.on_policy.export", "while exporting"),
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
