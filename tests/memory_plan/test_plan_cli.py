"""--plan and --memory on the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from hybrid_rlhf.cli import main
from tests.factories.stage_options import used
from tests.factories.tiny import save_tiny, tiny_config


@pytest.fixture
def sft(tmp_path, monkeypatch) -> list[str]:
    """A command line whose model is a config.json and nothing else."""
    monkeypatch.chdir(tmp_path)
    tiny_config().save_pretrained("bare")
    return ["--stage", "sft", "--output_dir", "out/sft", "--model.model_name_or_path", "bare",
            "--data.sources=[{path: demo/demonstrations}]", "--data.max_length", "64", "--model.dtype", "float32"]


def test_a_plan_needs_no_weights_no_data_and_leaves_nothing(sft, tmp_path, capsys) -> None:
    assert main([*sft, "--plan"]) == 0
    out = capsys.readouterr().out
    assert "policy" in out
    assert "optimizer" in out
    assert "fits: needs" in out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stage", ["reward", "ppo"])
def test_the_later_stages_plan_too(sft, stage, capsys) -> None:
    more = ["--roles.reward.model_name_or_path", "bare"] if stage == "ppo" else []
    assert main(["--stage", stage, "--output_dir", f"out/{stage}", *used(stage, sft[4:]), *more, "--plan",
                 *(["--data.max_prompt_length", "32", "--ppo.sampling.max_new_tokens", "8"] if stage == "ppo" else [])
                 ]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in (("KV cache", "train critic", "ref") if stage == "ppo" else ("train reward",)))


def test_all_stages_plan_before_any_has_run(capsys) -> None:
    assert main(["--stage", "all", "--plan"]) == 0
    out = capsys.readouterr().out
    assert out.count("fits: needs") == 3
    assert all(name in out for name in ("sft: ", "reward: ", "ppo: "))


@pytest.mark.slow
def test_all_stages_that_do_not_fit_on_a_card_say_so(capsys) -> None:
    """The optimizer may wait on the host only where every stage's may."""
    assert main(["--stage", "all", "--plan", "--cards", "80MiB"]) == 3
    out = capsys.readouterr().out
    assert out.count("short by") + out.count("fits: needs") == 3
    assert "short by" in out


def test_a_plan_that_does_not_fit_says_by_how_much_and_what_would_help(sft, capsys) -> None:
    assert main([*sft, "--plan", "--train.per_device_train_batch_size", "128", "--memory", "73MB"]) == 0
    out = capsys.readouterr().out
    assert "chosen for" in out
    assert "--engine.micro_batch_tokens" in out
    assert main([*sft, "--plan", "--memory", "65MiB"]) == 3
    assert "short by" in capsys.readouterr().out


def test_memory_that_is_no_amount_is_the_users_mistake(sft, capsys) -> None:
    assert main([*sft, "--memory", "24 Gigs"]) == 2
    assert capsys.readouterr().err == ("error: --memory '24 Gigs' is not an amount of memory; write a number and a "
                                       "unit, such as 24GiB, 24GB or 800MiB\n")


def test_a_plan_of_nothing_is_the_users_mistake(sft, capsys) -> None:
    assert main([*sft, "--model.model_name_or_path", "nowhere/at/all", "--plan"]) == 2
    assert "nowhere/at/all" in capsys.readouterr().err


def test_memory_chooses_and_trains(sft, tmp_path, capsys) -> None:
    save_tiny(tmp_path / "good")
    argv = [*sft, "--model.model_name_or_path", "good", "--train.max_steps", "1", "--data.max_samples", "64",
            "--train.per_device_train_batch_size", "64", "--memory", "72MB"]
    assert main(argv) == 0
    assert "chosen for 68.7 MiB: --engine.micro_batch_tokens" in capsys.readouterr().err
    settings = yaml.safe_load((tmp_path / "out/sft/config.yaml").read_text())
    assert settings["engine"]["micro_batch_tokens"] < 8192
    assert json.loads((tmp_path / "out/sft/run.json").read_text())["stage"] == "sft"


@pytest.mark.slow
def test_a_plan_imports_neither_deepspeed_nor_data_libraries(sft) -> None:
    program = ("import sys; from hybrid_rlhf.cli import main; code = main(sys.argv[1:]); "
               "print([m for m in ('deepspeed', 'datasets', 'peft', 'matplotlib') if m in sys.modules], code)")
    done = subprocess.run([sys.executable, "-c", program, *sft, "--plan"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"
