"""A model out of a checkpoint is that of a run which ends at that step, bit for bit, whatever was trained."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hybrid_rlhf.cli import main
from hybrid_rlhf.run import checkpoint, resume
from hybrid_rlhf.training import checkpoint_models, step1_sft
from tests.factories.tiny import own_cache, save_tiny

WORDS = ["red", "blue", "green sea", "cat", "a small dog", "fox", "sun", "the moon"]
TRAIN = ["--data.eval_fraction", "0", "--train.per_device_train_batch_size", "8", "--train.lr_scheduler_type",
         "constant", "--train.num_fixed_prompts", "0", "--train.save_steps", "2"]
LORA = ["--model.lora.r", "4"]
BOUNDED = ["--data.max_length", "48"]
RATE = ["--train.learning_rate", "1e-2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint_models")
    said = [[{"role": "user", "content": f"say {w} {i}"}, {"role": "assistant", "content": w}]
            for i in range(3) for w in WORDS]
    rows = {"sft": [{"messages": m} for m in said], "ppo": [{"prompt": m[:1]} for m in said],
            "reward": [{"prompt": m[:1], "chosen": m[1:], "rejected": [m[1] | {"content": "no"}]} for m in said]}
    for name, table in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in table))
    (folder / "count.py").write_text("def score(completions, **_):\n"
                                     "    return [float(len(c[0]['content'])) for c in completions]\n")
    save_tiny(folder / "base", hidden_size=64, intermediate_size=128)
    save_tiny(folder / "plain", template=False)
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        yield folder


def launch(place: Path, out: Path, stage: str, steps: int, *more: str, base: str = "base") -> Path:
    start = [] if "--model.preset" in more else ["--model.model_name_or_path", f"{place}/{base}"]
    assert main(["--stage", stage, "--output_dir", str(out), "--data.sources", f"[{{path: {place}/{stage}.jsonl}}]",
                 *start, *TRAIN, "--train.max_steps", str(steps), *more]) == 0
    return out


def sampled(place: Path, section: str) -> list[str]:
    return ["--roles.actor.learning_rate", "1e-2", "--data.max_prompt_length", "40", f"--{section}.max_new_tokens", "4",
            "--reward.functions", f"['{place}/count.py:score']"]


def same_files(one: Path, other: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                 "generation_config.json"):
        assert (one / name).exists() == (other / name).exists(), name
        if (one / name).exists():
            assert (one / name).read_text() == (other / name).read_text(), name


TRAINED = {
    "sft that begins at random": ("sft", [*RATE, *BOUNDED, "--model.preset", "tiny"], {}),
    "sft by adapters, a base without a template": ("sft", [*RATE, *BOUNDED, *LORA], {"base": "plain"}),
    "sft in bfloat16": ("sft", [*RATE, *BOUNDED, "--model.dtype", "bfloat16"], {}),
    "sft by adapters on 4 bits": ("sft", [*RATE, *BOUNDED, *LORA, "--model.load_in_4bit", "true"], {}),
    "sft with a part frozen": ("sft", [*RATE, *BOUNDED, "--model.freeze", "[embed_tokens]"], {}),
    "sft, ZeRO 1": ("sft", [*RATE, *BOUNDED, "--engine.zero_stage", "1"], {}),
    "sft, ZeRO 3": ("sft", [*RATE, *BOUNDED, "--engine.zero_stage", "3"], {}),
    "reward": ("reward", [*RATE, *BOUNDED], {}),
    "ppo by adapters on one base for all": ("ppo", [*LORA, "--roles.critic.learning_rate", "1e-2"],
                                            {"section": "ppo.sampling"})}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_checkpoint_gives_the_model_of_a_run_that_ends_there(name, place, tmp_path) -> None:
    stage, more, how = TRAINED[name]
    if section := how.get("section"):
        more = [*more, *sampled(place, section)]
    base = how.get("base", "base")
    longer = launch(place, tmp_path / "longer", stage, 4, *more, base=base)
    shorter = launch(place, tmp_path / "shorter", stage, 2, *more, base=base)
    step = longer / "checkpoints" / "step-00000002"
    assert main(["export", "--model", str(step), "--output_dir", str(tmp_path / "out")]) == 0
    same_files(tmp_path / "out", shorter / "model")
    last = load_file(longer / "model" / "model.safetensors")
    assert not all(value.equal(last[key]) for key, value in load_file(tmp_path / "out" / "model.safetensors").items())
    assert (tmp_path / "out" / "adapter").exists() == (shorter / "adapter").exists()


@pytest.fixture(scope="module")
def in_parts(place, tmp_path_factory) -> Path:
    """A checkpoint of a run at ZeRO 1, whose weights are flat."""
    out = launch(place, tmp_path_factory.mktemp("parts") / "run", "sft", 1, *RATE, *BOUNDED, "--engine.zero_stage", "1")
    return out / "checkpoints" / "step-00000001"


def test_the_dtype_that_a_card_chose_is_that_of_the_run() -> None:
    config, masters = step1_sft.Config(), {"optimizer": {"a": {"master": 1, "step": 2}}}
    given = replace(config, model=replace(config.model, dtype="float32"))
    assert checkpoint_models._as_trained(config, masters).model.dtype == "bfloat16"
    assert checkpoint_models._as_trained(config, {"optimizer": {"a": {"step": 2}}}) == config
    assert checkpoint_models._as_trained(given, masters) == given


def refused(step: Path, out: Path, capsys) -> str:
    assert main(["export", "--model", str(step), "--output_dir", str(out)]) == 2
    assert not out.exists()
    return capsys.readouterr().err.splitlines()[-1]


def test_a_checkpoint_of_which_a_process_holds_parts_is_refused(in_parts, tmp_path, capsys, monkeypatch) -> None:
    made = resume.made_by(in_parts) | {"world_size": 2}
    monkeypatch.setattr(resume, "made_by", lambda _path: made)
    assert "in parts of 2 processes" in refused(in_parts, tmp_path / "out", capsys)


def test_a_checkpoint_that_no_stage_made_is_refused(in_parts, tmp_path, capsys, monkeypatch) -> None:
    made = resume.made_by(in_parts) | {"stage": "mine"}
    monkeypatch.setattr(resume, "made_by", lambda _path: made)
    assert "stage 'mine'" in refused(in_parts, tmp_path / "out", capsys)


def test_a_damaged_checkpoint_is_refused(in_parts, tmp_path, capsys) -> None:
    copy = tmp_path / "run" / "checkpoints" / in_parts.name
    shutil.copytree(in_parts, copy)
    tensors = copy / "state.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    assert "is damaged (state.safetensors has" in refused(copy, tmp_path / "out", capsys)


def test_a_checkpoint_that_its_run_removes_is_held_or_refused(in_parts, tmp_path, capsys, monkeypatch) -> None:
    copy = tmp_path / "run" / "checkpoints" / in_parts.name
    shutil.copytree(in_parts, copy)
    opened = checkpoint_models.open_trained

    def late(path, output_dir):
        shutil.rmtree(copy)
        return opened(path, output_dir)

    monkeypatch.setattr(checkpoint_models, "open_trained", late)
    assert main(["export", "--model", str(copy), "--output_dir", str(tmp_path / "out")]) == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if p.name.startswith(".")) == []

    copy_files = checkpoint.copy_files
    monkeypatch.setattr(checkpoint, "copy_files", lambda path, folder: (shutil.rmtree(path), copy_files(path, folder)))
    shutil.copytree(in_parts, copy)
    assert "has just been removed by its run" in refused(copy, tmp_path / "again", capsys)
