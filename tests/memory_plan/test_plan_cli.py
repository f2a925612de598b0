"""--plan and --memory on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import cards  # benchmarks/cards.py
import pytest
import torch
import yaml

from hybrid_rlhf.cli import main
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.memory_plan import presets, trace
from hybrid_rlhf.memory_plan.amounts import Cards, parse_cards
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig
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


def test_a_plan_counts_the_last_smaller_batch_of_each_epoch_as_the_run_does(sft, tmp_path, capsys) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "p{i}", "completion": "c"}}\n' for i in range(5)))
    assert main(["--stage", "sft", "--model.preset", "tiny", "--data.sources", "rows.jsonl", "--data.eval_fraction",
                 "0", "--train.per_device_train_batch_size", "2", "--train.num_train_epochs", "2", "--plan"]) == 0
    assert "; a run of 6 steps\n" in capsys.readouterr().out


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


# -- plans for cards that are not there, and the file for two hosts ---------------------------------------------------


ROOT = Path(__file__).resolve().parents[2]

TWO_NODES = ROOT / "examples" / "two_nodes_70b.yaml"


@pytest.mark.parametrize(("text", "expected"), [("24GiB", Cards(1, 1, 24 << 30)), ("8x80GiB", Cards(1, 8, 80 << 30)),
                                                ("2x8x80gib", Cards(2, 8, 80 << 30))])
def test_cards_are_hosts_times_cards_times_memory(text, expected) -> None:
    assert parse_cards(text, "--cards") == expected
    assert parse_cards("2x8x80GiB", "--cards").world == 16
    assert parse_cards("100GiB", "--cards").usable == 97 << 30


@pytest.mark.parametrize("text", ["", "0x80GiB", "2x8x4x80GiB"])
def test_what_names_no_cards_is_one_clear_line(text) -> None:
    with pytest.raises(UserError, match="--cards"):
        parse_cards(text, "--cards")


@pytest.mark.parametrize("more", [["--cards", "24GiB"], ["--plan", "--cards", "24GiB", "--memory", "8GiB"]])
def test_cards_are_for_a_plan_alone(more, capsys) -> None:
    assert main(["--stage", "sft", "--model.preset", "tiny", "--data.sources=[{path: demo/demonstrations}]",
                 *more]) == 2
    assert "--cards" in capsys.readouterr().err


def test_weights_by_hand_in_bf16_and_in_4_bits(tmp_path) -> None:
    """Llama 8B by hand: 8,030,261,248 weights, of which 2 x 128,256 x 4,096 in the embeddings and the head, and
    65 x 4,096 in norms, stay in 16 bits; half a byte and an fp32 scale per 64 of the others."""
    folder = cards.write_shape("8B", tmp_path)
    plain, packed = (trace.sizes(ModelConfig(folder, dtype="bfloat16", lora=LoraConfig(r=16), load_in_4bit=is_4bit),
                                 torch.device("cuda")) for is_4bit in (False, True))
    kept = 2 * 128256 * 4096 + 65 * 4096
    assert plain.weight_bytes == pytest.approx(2 * 8_030_261_248, rel=1e-6)
    assert packed.weight_bytes == pytest.approx(2 * kept + (8_030_261_248 - kept) * (0.5 + 4 / 64), rel=1e-6)


@pytest.mark.slow
def test_two_hosts_of_eight_cards_hold_70b_and_one_host_of_four_does_not(tmp_path, monkeypatch, capsys) -> None:
    """By hand: a sixteenth of 141.1 GB of weights on each card is 8.2 GiB, an eighth of them for a rollout 16.4 GiB."""
    folder = cards.write_shape("70B", tmp_path)
    monkeypatch.chdir(tmp_path)
    argv = ["--stage", "ppo", "--config", str(TWO_NODES), "--model.model_name_or_path", folder,
            "--roles.reward.model_name_or_path", folder, "--plan"]
    assert main([*argv, "--cards", "2x8x80GiB"]) == 0
    out = capsys.readouterr().out
    assert "ppo: 16 processes on cuda, bfloat16, ZeRO 3" in out
    assert "fits: needs" in out
    rows = {tuple(line.split()[:2]): line.split()[2] for line in out.splitlines() if len(line.split()) > 2}
    assert rows["actor", "weights"] == "8.2"
    assert rows["actor", "gathered"] == "18.4"  # the embeddings whole: 2.0 GiB
    assert main([*argv, "--cards", "4x24GiB", "--roles.actor.tp", "4"]) == 3
    assert "short by" in capsys.readouterr().out


def test_the_file_for_two_hosts_says_how_it_is_started() -> None:
    text = TWO_NODES.read_text(encoding="utf-8")
    assert "--nnodes 2 --nproc_per_node 8" in text and "--cards 2x8x80GiB" in text
    assert yaml.safe_load(text)["engine"]["zero_stage"] == 3


@pytest.mark.slow
def test_a_row_of_the_table_is_what_the_plan_says(tmp_path) -> None:
    found = json.loads((ROOT / "docs/results/cards.json").read_text(encoding="utf-8"))
    row = next(r for r in found if (r["card_gib"], r["way"]) == (24, "qlora"))
    assert cards.largest("qlora", 24, tmp_path) == row


@pytest.mark.parametrize("name", [n for n, row in presets.CARDS.items() if row.gib])
def test_presets_and_the_table_of_cards_agree(name) -> None:
    """The table has Llama's 8B where the presets, of one family, name Qwen's 7B."""
    preset = presets.CARDS[name]
    way = "qlora" if preset.settings.get("model.load_in_4bit") else "lora"
    found = json.loads((ROOT / "docs/results/cards.json").read_text(encoding="utf-8"))
    row = next(r for r in found if (r["card_gib"], r["way"]) == (preset.gib, way))
    assert row["shape"].replace("8B", "7B") == preset.fits
    if row["micro_batch_tokens"] < cards.TOKENS[0]:  # the larger one did not fit
        assert preset.settings["engine.micro_batch_tokens"] <= row["micro_batch_tokens"]


@pytest.mark.parametrize(("text", "gib", "name"), [
    ("RTX 4060 Ti 16GB", 16, "4060ti"), ("4060-ti", 16, "4060ti"), ("NVIDIA GeForce RTX 4090", 24, "4090"),
    ("rtx 3090", 24, "3090"), ("24 GiB", 24, ""), ("RTX 3070 8GB", 8, "3070"), ("RTX 3060 12GB", 12, "3060"),
    ("A100 80GB", 80, "a100"), ("4090 MiB", 3, "")])
def test_a_card_may_be_named_as_its_maker_does(text, gib, name):
    found = parse_cards(text, "--cards")
    assert (found.memory >> 30, found.name, found.world) == (gib, name, 1)


@pytest.mark.parametrize("text", ["4060", "4060 Ti 8GB", "3070 Ti", "3070 12GB"])
def test_a_card_that_is_not_known_is_told_which_are(text):
    with pytest.raises(UserError, match=r"nor a card that is known here: 3060 \(12 GiB\), 3070 \(8 GiB\), 3090"):
        parse_cards(text, "--cards")


def test_a_plan_for_a_quantised_base_without_adapters_is_refused_as_the_run_is(tmp_path, capsys):
    path = save_tiny(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    assert main(["--stage", "sft", "--plan", "--cards", "24GiB", "--model", path, "--model.load_in_4bit", "true",
                 "--data.sources", str(tmp_path / "rows.jsonl"), "--data.max_length", "32"]) == 2
    assert "a quantised base cannot be fully fine-tuned; set model.lora.r" in capsys.readouterr().err
