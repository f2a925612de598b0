"""A run that another number of processes takes up ends as one that nothing interrupted, up to rounding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rlhf.cli import main
from hybrid_rlhf.run import checkpoint
from tests.distributed.two_processes import argv_of, metrics, write_data
from tests.factories.processes import TORCHRUN, free_port, start

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1500)]
ROWS = 8  # of a step, over all processes
WAYS = {"1 to 2": (1, 2), "2 to 1": (2, 1), "2 to 4": (2, 4)}
STAGES = ("sft", "ppo")
# Adam divides by the root of a square that may be nothing but rounding: a larger epsilon does not let it
SETTINGS = ["--train.max_steps", "5", "--train.optim", "adamw", "--train.adam_epsilon", "1e-3",
            "--train.save_steps", "2",
            "--train.learning_rate", "2e-3", "--train.weight_decay", "0.1"]
RATES = {"sft": [], "ppo": ["--roles.actor.learning_rate", "2e-3", "--roles.critic.learning_rate", "2e-3"]}
BFLOAT16 = ["--model.dtype", "bfloat16"]  # without a stage: 0 with masters on one process, 1 on several


def cases() -> dict[str, tuple[str, str, list[str]]]:
    """name -> (stage, way, settings): both stages at every stage of ZeRO, which goes up for one and down for the
    other."""
    found = {f"{stage}, zero {zero}, {way}": (stage, way, ["--engine.zero_stage", str(zero)])
             for i, stage in enumerate(STAGES) for zero in range(4)
             for way in ("1 to 2", "2 to 1")[(i + zero) % 2 :][:1]}
    found |= {f"{stage}, zero {zero}, 2 to 4": (stage, "2 to 4", ["--engine.zero_stage", str(zero)])
              for stage, zero in (("sft", 1), ("ppo", 3))}
    return found | {f"sft, bfloat16, {way}": ("sft", way, BFLOAT16) for way in ("1 to 2", "2 to 1")}


def argv(folder: Path, name: str, stage: str, processes: int, *more: str) -> list[str]:
    """The command line of `stage` in a folder of its own."""
    where = name.replace(", ", "_").replace(" ", "")
    starts = ["--model.model_name_or_path", f"{folder}/one/sft", "--roles.reward.model_name_or_path",
              f"{folder}/one/reward"] if stage == "ppo" else []
    return argv_of(folder, {stage: stage}, where, ROWS // processes, *SETTINGS, *starts, *more)[stage] + RATES[stage]


def left(folder: Path, name: str, stage: str) -> Path:
    return folder / name.replace(", ", "_").replace(" ", "") / stage


def together(folder: Path, processes: int, runs: dict) -> dict:
    """The outcomes of command lines that so many processes run."""
    file = folder / f"runs_{len(list(folder.glob('runs_*')))}.json"
    file.write_text(json.dumps({name: [run] for name, run in runs.items()}))
    started = start([*TORCHRUN, "--nproc_per_node", str(processes), "--master_port", free_port(),
                     "tests/factories/rank_runs.py", str(file)], Path(__file__).parents[2])
    out, log = started.communicate(timeout=900)
    assert started.returncode == 0, log[-3000:]
    (folder / f"{file.stem}.log").write_text(f"{out}\n{log}")
    return {name: outcome for name, [outcome] in json.loads(Path(f"{file}.out").read_text()).items()}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Runs that nothing interrupts, and of each case one that dies in step 4 and is taken up after step 2."""
    folder = tmp_path_factory.mktemp("another_number")
    write_data(folder)
    for parent in argv_of(folder, {"sft": "sft", "reward": "reward"}, "one", ROWS).values():
        assert main(parent) == 0
    whole = {"sft": [], "ppo": [], "bfloat16": BFLOAT16}
    assert set(together(folder, 1, {name: (argv(folder, name, "ppo" if name == "ppo" else "sft", 1, *more), None)
                                    for name, more in whole.items()}).values()) == {0}
    for processes in (1, 2):
        dying = {name: (argv(folder, name, stage, processes, *more), 4) for name, (stage, way, more) in cases().items()
                 if WAYS[way][0] == processes}
        assert set(together(folder, processes, dying).values()) == {"killed"}
    for processes in (1, 2, 4):
        resumed = {name: (argv(folder, name, stage, processes, *more), None)
                   for name, (stage, way, more) in cases().items() if WAYS[way][1] == processes}
        assert set(together(folder, processes, resumed).values()) == {0}
    return folder


def straight(folder: Path, name: str) -> Path:
    return left(folder, "bfloat16" if "bfloat16" in name else cases()[name][0], cases()[name][0])


@pytest.mark.parametrize("name", [name for name in cases() if "bfloat16" not in name])
def test_the_weights_are_those_of_a_run_that_nothing_interrupted(place, name):
    for model in ("model", "model_ema") if name.startswith("ppo") else ("model",):
        expected, found = (load_file(out / model / "model.safetensors") for out in
                           (straight(place, name), left(place, name, cases()[name][0])))
        assert expected.keys() == found.keys()
        for key, weight in expected.items():
            torch.testing.assert_close(found[key], weight, rtol=1e-4, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", [name for name in cases() if "bfloat16" not in name])
def test_every_step_saw_the_same_rows_and_drew_the_same_responses(place, name):
    out = left(place, name, cases()[name][0])
    expected, found = metrics(straight(place, name)), metrics(out)
    assert [row["step"] for row in found] == [row["step"] for row in expected] == [1, 2, 3, 4, 5, 5]
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-5)
    if name.startswith("ppo"):
        drawn, again = (samples(each) for each in (straight(place, name), out))
        assert drawn.keys() == again.keys() == {1, 2, 3, 4, 5}
        for step, texts in again.items():  # the first process's: of four, it has two prompts, one response to each
            assert texts == drawn[step][:len(texts)] and len(texts) >= 2


def samples(out: Path) -> dict[int, list[str]]:
    """step -> the responses that are shown of it."""
    found: dict[int, list[str]] = {}
    for row in metrics(out, "samples.jsonl"):
        found.setdefault(row["step"], []).append(row["completion"])
    return found


@pytest.mark.parametrize("name", [name for name in cases() if "bfloat16" in name])
def test_fp32_masters_of_bfloat16_weights_change_places_with_parts(place, name):
    """Half a per cent of the way is the rounding of gradients in bfloat16."""
    begun = load_file(place / "base" / "model.safetensors")
    expected, found = (load_file(out / "model" / "model.safetensors") for out in
                       (straight(place, name), left(place, name, "sft")))
    way = torch.cat([(expected[k] - begun[k]).float().flatten() for k in expected])
    off = torch.cat([(expected[k] - found[k]).float().flatten() for k in expected])
    assert 0 < off.norm() < 0.02 * way.norm()


def test_the_last_checkpoint_is_of_those_who_went_on(place):
    for name, (stage, way, _) in cases().items():
        path = checkpoint.latest(left(place, name, stage) / "checkpoints")
        assert checkpoint.number(path) == 5 and checkpoint.num_processes(path) == WAYS[way][1]
