"""Every stage and layout of the launcher on the simulated card: the numbers of the processor, and nothing left on the
way that only a processor forgives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rlhf.cli import main
from hybrid_rlhf.engine.train.adamw_master import MasterAdamW
from hybrid_rlhf.trainers.ppo import PPOTrainer
from tests.factories.tiny import own_cache
from tests.inference.server.tiny_server import chat, content, running
from tests.simulated_card import AMPERE, HOPPER, runs, simulated_card
from tests.simulated_card.sweep import sweep

REWARD_MODEL = ["--roles.reward.model_name_or_path", "reward"]
FUNCTION = ["--reward.functions", "[rewards.py:short]"]
OFFLOADED = [word for role in ("actor", "critic", "ref", "reward") for word in (f"--roles.{role}.offload", "true")]
RUNS = {
    "packed": runs.words("sft", "--data.packing", "true"),
    "8bit": runs.words("sft", *runs.LORA, "--model.load_in_8bit", "true"),
    "dpo": runs.words("dpo"),
    "grpo": runs.words("grpo", *FUNCTION),
    "ppo": runs.words("ppo", *REWARD_MODEL),
    "ppo-one-base": runs.words("ppo", "--roles.reward.model_name_or_path", "lora-reward", *runs.LORA),
    "ppo-offload": runs.words("ppo", *REWARD_MODEL, *OFFLOADED),
    "ppo-optimizer-offload": runs.words("ppo", *FUNCTION, "--engine.offload", "[optimizer,activations]"),
    "ppo-zero2": runs.words("ppo", *FUNCTION, "--engine.zero_stage", "2"),
    "ppo-zero3": runs.words("ppo", *FUNCTION, "--engine.zero_stage", "3"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("card")
    runs.prepare(made)
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, made / "cache")
        with runs.inside(made):
            assert main([*runs.words("reward"), "--output_dir", "reward"]) == 0
            assert main([*runs.words("reward", *runs.LORA), "--output_dir", "lora-reward"]) == 0
            yield made


def check(folder, name: str, words: list[str]) -> None:
    assert main([*words, "--output_dir", f"{name}-cpu"]) == 0
    with simulated_card() as card:
        assert main([*words, "--output_dir", name]) == 0
    assert card.memory.count > 500
    assert len(runs.metrics(folder / name)) >= 2
    compare(folder, name)


def compare(folder, name: str, *, rel: float = 2e-3, off: float = 2e-4) -> None:
    """The metrics of both devices agree: kernels and the order of sums differ, so by 1 in 500."""
    there, here = runs.metrics(folder / name), runs.metrics(folder / f"{name}-cpu")
    assert len(there) == len(here) >= 1
    for left, right in zip(there, here, strict=True):
        assert left.keys() == right.keys()
        assert left == pytest.approx(right, rel=rel, abs=off)


def in_bf16(words: list[str]) -> list[str]:
    return ["bfloat16" if word == "float32" else word for word in words]


@pytest.mark.parametrize("profile", [AMPERE, HOPPER], ids=["8.6, 24 GB", "9.0, 80 GB"])
@pytest.mark.parametrize("stage", ["sft", "dpo", "ppo"])
def test_a_run_in_bf16_gives_the_processors_numbers_on_two_cards(folder, stage, profile, monkeypatch):
    """The card's default: bf16 with masters in fp32, which a card steps in batches and a processor one by one."""
    words, own, batches = in_bf16(runs.words(stage, *(FUNCTION * (stage == "ppo")))), MasterAdamW._step_batch, []
    monkeypatch.setattr(MasterAdamW, "_step_batch", lambda self, batch, *given: (batches.append(
        {tensors[0].dtype for tensors in batch}), own(self, batch, *given)))
    name = f"bf16-{stage}-{profile['capability'][0]}"
    with simulated_card(**profile):
        assert main([*words, "--output_dir", name]) == 0
    assert len(batches) >= 2 and {torch.bfloat16} in batches
    assert main([*words, "--output_dir", f"{name}-cpu"]) == 0
    compare(folder, name, off=2e-3)  # a KL penalty near 0


DECODING = {"_scan", "_cut", "_draw", "_attend_single", "_product", "_place_heads", "_norm_row"}  # with top-k
GRADIENTS = {"_score_backward", "_norm_backward", "_gate_backward", "_turn"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_by_the_kernels_themselves_gives_the_processors_numbers(folder):
    """Triton's, in its interpreter, which must be chosen before Triton is imported and cuts bf16 where cards round."""
    pytest.importorskip("triton")
    words = in_bf16(runs.words("ppo", *FUNCTION, "--ppo.entropy_coef", "0.01", "--ppo.sampling.top_k", "20",
                               "--train.max_steps", "1", "--train.per_device_train_batch_size", "4"))
    assert main([*words, "--output_dir", "interpreted-cpu"]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulated_card.runs", *words, "--output_dir", "interpreted"], check=False,
        capture_output=True, text=True,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])})
    assert done.returncode == 0, done.stderr[-2000:]
    launches, of_gradients = json.loads(done.stdout.splitlines()[-1])
    assert launches.keys() >= DECODING and of_gradients.keys() >= GRADIENTS, (launches, of_gradients)
    compare(folder, "interpreted", rel=1e-2, off=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_the_card_gives_the_numbers_of_the_processor(folder, name):
    check(folder, name, RUNS[name])


@pytest.mark.slow
def test_a_4_bit_run_gives_the_processors_numbers_and_goes_on_bit_for_bit(folder, monkeypatch):
    words, step = runs.words("ppo", *FUNCTION, *runs.LORA, "--model.load_in_4bit", "true"), PPOTrainer.step
    check(folder, "whole", words)
    calls = iter([False, True])
    with monkeypatch.context() as patch, simulated_card():
        patch.setattr(PPOTrainer, "step", lambda self, batch: _stop() if next(calls) else step(self, batch))
        assert main([*words, "--output_dir", "stopped"]) == 130
    with simulated_card():
        assert main([*words, "--output_dir", "stopped"]) == 0
    assert runs.metrics(folder / "stopped") == runs.metrics(folder / "whole")
    weights = [load_file(folder / name / "model" / "model.safetensors") for name in ("stopped", "whole")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


def _stop() -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_what_a_run_leaves_is_used_on_the_card_as_on_the_processor(folder, capsys):
    """chat, evaluate, export and the server."""
    assert main([*runs.words("sft"), "--output_dir", "trained"]) == 0
    said = {}
    for device in ("cpu", "cuda"):
        with simulated_card() if device == "cuda" else nullcontext():
            said[device] = used(folder, device, capsys)
    assert said["cpu"] == said["cuda"]


def used(folder, device: str, capsys) -> tuple:
    """What each command says of the trained model."""
    capsys.readouterr()
    greedy = ["--temperature", "0", "--max_new_tokens", "9"]
    assert main(["chat", "--model", "trained", "--prompt", "say red", *greedy]) == 0
    answer = capsys.readouterr().out
    assert main(["--stage", "evaluate", "--evaluate.models", "[base, trained]", "--data.sources", "ppo.jsonl",
                 *FUNCTION, "--data.max_prompt_length", "32", "--model.dtype", "float32",
                 "--evaluate.sampling.max_new_tokens", "8", "--evaluate.sampling.temperature", "0", "--output_dir",
                 f"evaluated-{device}"]) == 0
    assert main(["export", "--model", "trained", "--output_dir", f"exported-{device}"]) == 0
    with running({"trained": str(folder / "trained" / "model")}) as served:
        streamed = content(chat(served.url, "say red", model="trained", temperature=0, max_tokens=9))
    samples = (folder / f"evaluated-{device}" / "evaluate.md").read_text().replace(device, "")
    exported = load_file(folder / f"exported-{device}" / "model.safetensors")
    return answer, streamed, samples, {name: weight.sum().item() for name, weight in exported.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["full", "qlora"])
def test_a_run_short_of_memory_anywhere_goes_on_or_says_what_helps(case, tmp_path, monkeypatch):
    """Every 24th of the allocations that the sweep lets fail (sweep.py; docs/results/out_of_memory.md has all)."""
    own_cache(monkeypatch, tmp_path / "cache")
    _, found = sweep(tmp_path, case, every=24)
    assert {outcome.kind for outcome in found} == {"goes on", "explained"}, [
        outcome for outcome in found if outcome.kind not in ("goes on", "explained")]
