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
# Adam divides by the root of a square that may be nothing but rounding: a larger epsilon does not let it
SETTINGS = ["--train.max_steps", "5", "--train.optim", "adamw", "--train.adam_epsilon", "1e-3",
            "--train.save_steps", "2",
            "--train.learning_rate", "2e-3", "--train.weight_decay", "0.1"]
RATES = {"sft": [], "ppo": ["--roles.actor.learning_rate", "2e-3", "--roles.critic.learning_rate", "2e-3"]}
BFLOAT16 = ["--model.dtype", "bfloat16"]  # without a stage: 0 with masters on one process, 1 on several
# stage, ZeRO's stage, way: every stage of ZeRO, two of them with a critic and an average of the policy
LAID_OUT = [("sft", 0, "1 to 2"), ("sft", 1, "2 to 4"), ("sft", 3, "2 to 1"), ("ppo", 2, "2 to 1"),
            ("ppo", 3, "1 to 2")]
# name -> (stage, way, settings)
CASES = {f"{stage}, zero {zero}, {way}": (stage, way, ["--engine.zero_stage", str(zero)])
         for stage, zero, way in LAID_OUT} | {f"sft, bfloat16, {way}": ("sft", way, BFLOAT16)
                                              for way in ("1 to 2", "2 to 1")}
IN_FLOAT32 = [name for name in CASES if "bfloat16" not in name]


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
    whole = {name: (argv(folder, name, "ppo" if name == "ppo" else "sft", 1, *more), None)
             for name, more in {"sft": [], "ppo": [], "bfloat16": BFLOAT16}.items()}

    def part(ways: list[str], of: int, dies_at: int | None) -> dict:
        return {f"{name} {dies_at}": (argv(folder, name, stage, WAYS[way][of], *more), dies_at)
                for name, (stage, way, more) in CASES.items() if way in ways}

    for processes, died, resumed in ((1, part(["1 to 2"], 0, 4), whole),
                                     (2, part(["2 to 1", "2 to 4"], 0, 4), part(["1 to 2"], 1, None)),
                                     (1, {}, part(["2 to 1"], 1, None)), (4, {}, part(["2 to 4"], 1, None))):
        assert together(folder, processes, died | resumed) == dict.fromkeys(died, "killed") | dict.fromkeys(resumed, 0)
    return folder


def straight(folder: Path, name: str) -> Path:
    return left(folder, "bfloat16" if "bfloat16" in name else CASES[name][0], CASES[name][0])


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_the_weights_are_those_of_a_run_that_nothing_interrupted(place, name):
    for model in ("model", "model_ema") if name.startswith("ppo") else ("model",):
        expected, found = (load_file(out / model / "model.safetensors") for out in
                           (straight(place, name), left(place, name, CASES[name][0])))
        assert expected.keys() == found.keys()
        for key, weight in expected.items():
            torch.testing.assert_close(found[key], weight, rtol=1e-4, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_every_step_saw_the_same_rows_and_drew_the_same_responses(place, name):
    out = left(place, name, CASES[name][0])
    expected, found = metrics(straight(place, name)), metrics(out)
    assert [row["step"] for row in found] == [row["step"] for row in expected] == [1, 2, 3, 4, 5, 5]
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-5)
    if name.startswith("ppo"):
        drawn, again = (samples(each) for each in (straight(place, name), out))
        assert drawn.keys() == again.keys() == {1, 2, 3, 4, 5}
        for step, texts in again.items():  # the first process's
            assert texts == drawn[step][:len(texts)] and len(texts) >= 2


def samples(out: Path) -> dict[int, list[str]]:
    """step -> the responses that are shown of it."""
    found: dict[int, list[str]] = {}
    for row in metrics(out, "samples.jsonl"):
        found.setdefault(row["step"], []).append(row["completion"])
    return found


@pytest.mark.parametrize("name", [name for name in CASES if "bfloat16" in name])
def test_fp32_masters_of_bfloat16_weights_change_places_with_parts(place, name):
    """Half a per cent of the way is the rounding of gradients in bfloat16."""
    begun = load_file(place / "base" / "model.safetensors")
    expected, found = (load_file(out / "model" / "model.safetensors") for out in
                       (straight(place, name), left(place, name, "sft")))
    way = torch.cat([(expected[k] - begun[k]).float().flatten() for k in expected])
    off = torch.cat([(expected[k] - found[k]).float().flatten() for k in expected])
    assert 0 < off.norm() < 0.02 * way.norm()


def test_the_last_checkpoint_is_of_those_who_went_on(place):
    for name, (stage, way, _) in CASES.items():
        path = checkpoint.latest(left(place, name, stage) / "checkpoints")
        assert checkpoint.number(path) == 5 and checkpoint.num_processes(path) == WAYS[way][1]
