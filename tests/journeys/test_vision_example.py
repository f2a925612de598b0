"""The example of models that read images: the commands of its page, with fewer steps, and other stages on pictures."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from hybrid_rlhf.cli import main
from tests.factories.tiny import own_cache

EXAMPLE = Path(__file__).parents[2] / "examples" / "vision"


def commands() -> list[list[str]]:
    """The words of the commands of README.md that need no card."""
    text = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^(?<!-->\n)```sh\n(.*?)^```$", text, re.M | re.S)
    return [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def run(words: list[str], patch: pytest.MonkeyPatch, *more: str) -> None:
    """A command of the page, in this process."""
    if words[1] == "train.py":
        assert main([*words[2:], *more]) == 0
    else:
        patch.setattr(sys, "argv", [*words[1:], *more])
        runpy.run_path(words[1], run_name="__main__")


@pytest.fixture
def patch(tmp_path, monkeypatch):
    """In a folder with the example alone; its pictures and the model are made by the page."""
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "vision")
    own_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    return monkeypatch


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in Path("outputs/vision", name).read_text().splitlines()]


def metrics(run: str) -> list[dict]:
    return rows_of(f"{run}/metrics.jsonl")


def write(name: str, rows: list[dict]) -> None:
    Path("outputs/vision", name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_grpo_teaches_the_question_about_pictures_and_nothing_where_they_are_shuffled(patch):
    pictures, model, sft, grpo, shuffled = commands()
    run(pictures, patch)
    run(model, patch)
    run(sft, patch, "--train.max_steps=150")
    run(grpo, patch, "--train.max_steps=30")
    run(shuffled, patch, "--train.max_steps=30")
    said = {row["images"][0]: row["messages"][1]["content"].split()[1] for row in rows_of("captions.jsonl")}
    answers = [row for row in rows_of("sft/answers.jsonl") if row["step"] and "Describe" in row["prompt"]]
    for row in answers:  # of the report: the model sees the picture that it names
        name = re.search(r"\[(\w+\.png)\]", row["prompt"])[1]
        assert row["completion"].split()[1] == said[f"pictures/{name}"]
    assert answers
    assert metrics("grpo")[0]["reward"] < 0.4  # one of four colours is right
    assert metrics("grpo")[-1]["eval/reward"] > 0.7
    assert metrics("shuffled")[-1]["eval/reward"] < 0.4  # at most the colour that is most frequent


def test_sft_dpo_reward_and_grpo_run_on_pictures(patch, capfd):
    pictures, model, sft, grpo, _ = commands()
    run(pictures, patch, "--captions=12", "--questions=8", "--unseen=4")
    run(model, patch)
    rows = rows_of("captions.jsonl")
    write("pairs.jsonl", [{"prompt": row["messages"][:1], "chosen": row["messages"][1:], "images": row["images"],
                           "rejected": [{"role": "assistant", "content": "a"}]} for row in rows])
    short = ("--train.max_steps=2", "--train.per_device_train_batch_size=4", "--train.num_fixed_prompts=1")
    run(sft, patch, *short)
    assert "the text part is trained, and so is model.visual" in capfd.readouterr().err
    run(grpo, patch, *short)
    assert "the text part is trained; frozen: model.visual" in capfd.readouterr().err
    for stage, more in (("dpo", ()), ("reward", ("--reward.own_samples=2", "--data.eval_fraction=0.4"))):
        assert main(["--stage", stage, "--model.model_name_or_path", "outputs/vision/sft", "--data.sources",
                     "outputs/vision/pairs.jsonl", "--output_dir", f"outputs/vision/{stage}", *short, *more]) == 0
    for stage, count in (("sft", 24), ("dpo", 12), ("reward", 12), ("grpo", 12)):
        report = Path("outputs/vision", stage, "report.md").read_text()
        assert f"data: {count} rows with images" in report
        assert len([row for row in metrics(stage) if "loss" in row or "reward" in row]) >= 2
        page = Path("outputs/vision", stage, "report.html").read_text()
        assert 'src="data:image/jpeg;base64,' in page and "cannot be read" not in page
        assert "png" in report and "image_pad" not in report  # people see names of files, and not what stands for them
    assert metrics("dpo")[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # ln 2: the policy is the reference
    assert len({row["prompt"] for row in rows_of("grpo/samples.jsonl") if row["step"] == 1}) == 4
