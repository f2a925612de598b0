"""Images that processes have different numbers and sizes of, or none: the weights of one process that had all rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from hybrid_rlhf.cli import main
from tests.factories.processes import ended, launch
from tests.factories.vision import folder, image_files

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]
LAYOUTS = [(stage, frozen) for stage in (1, 2, 3) for frozen in (False, True)]


def row(number: int) -> dict:
    """Images of two sizes, and none in half of the rows."""
    files = image_files()
    asked: dict = {"prompt": [{"role": "user", "content": f"say {number}"}],
                   "completion": [{"role": "assistant", "content": "a fox" if number % 3 else "the sea"}]}
    return asked if number % 2 else asked | {"images": [files[number % 4 // 2].path]}


def argv(place: Path, name: str, batch: int, frozen: bool, *more: str) -> list[str]:
    return ["--stage", "sft", "--model.model_name_or_path", folder("qwen3_vl"), "--model.dtype", "float32",
            "--data.sources", f"[{place}/rows.jsonl]", "--data.cache_dir", f"{place}/cache", "--data.eval_fraction",
            "0", "--model.freeze_vision", str(frozen).lower(), "--train.max_steps", "3", "--train.optim", "sgd",
            "--train.learning_rate", "0.1", "--train.per_device_train_batch_size", str(batch), "--output_dir",
            f"{place}/{name}", *more]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("ranks")
    (place / "rows.jsonl").write_text("".join(json.dumps(row(i)) + "\n" for i in range(16)))
    runs = {f"{stage}{frozen}": [[argv(place, f"{stage}{frozen}", 4, frozen, "--engine.zero_stage", str(stage),
                                       "--engine.micro_batch_tokens", "40"), None]] for stage, frozen in LAYOUTS}
    (place / "runs.json").write_text(json.dumps(runs))
    for frozen in (False, True):
        assert main(argv(place, f"one{frozen}", 8, frozen)) == 0
    done = ended(launch("tests/factories/rank_runs.py", f"{place}/runs.json"))
    assert (place / "runs.json.out").exists(), done.stderr[-3000:]
    return place


@pytest.mark.parametrize(("stage", "frozen"), LAYOUTS)
def test_two_processes_with_unlike_images_train_the_weights_of_one(place, stage, frozen):
    one, two = (load_file(place / name / "model" / "model.safetensors") for name in (f"one{frozen}",
                                                                                     f"{stage}{frozen}"))
    assert one.keys() == two.keys()
    for name, weight in one.items():
        assert_close(two[name], weight, atol=2e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
