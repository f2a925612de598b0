"""`hybrid-rlhf init` and the cards: what it writes is read by the stage it is for, and what it says fits does."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys

import pytest
import yaml

from hybrid_rlhf import cli
from hybrid_rlhf.commands import init
from hybrid_rlhf.core.config import parse
from hybrid_rlhf.memory_plan import presets
from tests.factories.stage_options import short_sft
from tests.factories.tiny import save_tiny

ROWS = {"sft": {"prompt": "p", "completion": "c"}, "ppo": {"prompt": "p", "chosen": "c", "rejected": "r"},
        "dpo": {"prompt": "p", "chosen": "c", "rejected": "r"}, "grpo": {"prompt": "1+1", "answer": "2"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


def data_of(folder, goal: str) -> str:
    path = folder / f"{goal} rows.jsonl"
    path.write_text("".join(json.dumps(ROWS[goal]) + "\n" for _ in range(4)))
    return str(path)


def flags(tmp_path, start, goal="dpo", card="8gb", **more) -> list[str]:
    given = {"goal": goal, "data": data_of(tmp_path, goal) if goal in ROWS else "x", "model": start, "card": card,
             "output_dir": str(tmp_path / "out"), "file": str(tmp_path / "mine.yaml")} | more
    return [word for name, value in given.items() for word in (f"--{name}", value)]


@pytest.mark.parametrize(("goal", "card"), [*((goal, "8gb") for goal in init.GOALS),
                                            *(("dpo", card) for card in presets.CARDS if card != "8gb")])
def test_what_it_writes_is_a_config_of_its_stage_with_the_cards_settings(tmp_path, model, goal, card, capsys):
    assert cli.main(["init", *flags(tmp_path, model, goal, card)]) == 0
    assert f"--config {tmp_path / 'mine.yaml'} --plan" in capsys.readouterr().out
    row = cli.STAGES[init.GOALS[goal].stage]
    config, _ = parse(importlib.import_module(row.module).Config,
                      [*row.preset, "--config", str(tmp_path / "mine.yaml")], prog="x")
    assert config.data.sources[0].path == data_of(tmp_path, goal)
    assert config.model.lora.r == 16
    assert config.model.load_in_4bit == (card in ("8gb", "12gb", "16gb", "24gb"))
    assert config.engine.micro_batch_tokens == presets.CARDS[card].settings["engine.micro_batch_tokens"]


@pytest.mark.parametrize("goal", ["dpo", "ppo"])
@pytest.mark.parametrize("name", ["a, b}.jsonl", "a: [b] #c.jsonl", "{a}'\".jsonl"])
def test_a_path_with_yamls_own_marks_is_read_as_it_is(goal, name):
    answers = {"goal": goal, "data": name, "model": name, "card": "cpu", "output_dir": name}
    written = yaml.safe_load(init.settings_text(answers))
    assert {source["path"] for source in written["data"]["sources"]} == {name}
    assert (written["model"]["model_name_or_path"], written["output_dir"]) == (name, name)


def test_every_line_that_may_be_changed_has_a_comment(tmp_path, model):
    assert cli.main(["init", *flags(tmp_path, model)]) == 0
    text = (tmp_path / "mine.yaml").read_text()
    assert text.count("#") >= 8
    assert yaml.safe_load(text)["model"]["lora"] == {"r": 16}


def test_a_default_that_depends_on_settings_says_on_which():
    text = init.settings_text({"goal": "ppo", "data": "x.jsonl", "model": "m", "card": "cpu", "output_dir": "out"})
    assert "learning_rate: null  # by the table: 0.0002 for adapters, 2e-05 for all weights\n" in text
    assert "kl_coef: null  # by the table: depends on the rewards; raise it where answers get strange" in text


def test_what_flags_leave_open_is_asked_and_again_where_an_answer_does_not_fit(tmp_path, model, capsys):
    typed = iter(["dop", "dpo", str(tmp_path / "none.jsonl"), data_of(tmp_path, "dpo"), "24gb", ""])
    asked = []

    def read(question):
        asked.append(question)
        return next(typed)

    answers = init.ask({"goal": None, "data": None, "model": model, "card": None, "output_dir": None}, read)
    assert answers == {"goal": "dpo", "data": data_of(tmp_path, "dpo"), "model": model, "card": "24gb",
                       "output_dir": "outputs/mine"}
    assert len(asked) == 6
    said = capsys.readouterr().err
    assert "did you mean dpo?" in said
    assert "does not exist" in said


@pytest.mark.parametrize(("changes", "said"), [
    ({"goal": "pop"}, "--goal pop: choose sft, ppo, dpo, grpo (did you mean ppo?)"),
    ({"card": "23gb"}, "--card 23gb: choose"), ({"data": "./none.jsonl"}, "does not exist"),
    ({"model": "./none"}, "model folder ./none does not exist"), ({"model": ""}, "--model is empty"),
    ({"output_dir": __file__}, "is not a folder"), ({"file": __file__}, "exists; choose another --file"),
])
def test_a_wrong_answer_is_one_line_and_nothing_is_written(tmp_path, model, changes, said, capsys):
    assert cli.main(["init", *flags(tmp_path, model, **changes)]) == 2
    err = capsys.readouterr().err
    assert (said in err, err.count("\n")) == (True, 1), err
    assert not (tmp_path / "mine.yaml").exists()


def test_data_that_cannot_serve_the_goal_says_what_is_missing(tmp_path, model, capsys):
    assert cli.main(["init", *flags(tmp_path, model, "dpo", data=data_of(tmp_path, "sft"))]) == 2
    assert "make no pair; this goal needs pair rows" in capsys.readouterr().err


def test_without_a_terminal_missing_answers_are_named(tmp_path, model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", open("/dev/null"))  # noqa: SIM115
    assert cli.main(["init", "--goal", "sft", "--file", str(tmp_path / "x.yaml")]) == 2
    assert ("give --data, --model, --card, --output_dir, such as hybrid-rlhf init --goal sft --data mine.jsonl --model "
            in capsys.readouterr().err)


# --- cards -----------------------------------------------------------------------------------------------------------

def test_a_card_is_found_by_its_memory():
    assert [presets.closest(g) for g in (None, 5.8, 7.9, 11.6, 15.7, 23.6, 44.5, 79.2, 140)] == [
        "cpu", "8gb", "8gb", "12gb", "16gb", "24gb", "24gb", "80gb", "80gb"]


@pytest.mark.parametrize("stage", cli.STAGES)
def test_every_stage_takes_every_cards_settings(stage):
    row = cli.STAGES[stage]
    if stage == "evaluate":
        pytest.skip("it trains nothing")
    for name in ("cpu", "8gb", "80gb"):
        found, rest = cli._take_preset(["--preset", name, "--seed", "3"])
        words = [*row.preset, *presets.flags(found), *rest]
        config, _ = parse(importlib.import_module(row.module).Config, words, prog="x")
        assert (config.seed, config.model.lora.r) == (3, 16)


def test_what_is_given_beside_a_preset_wins():
    found, rest = cli._take_preset(["--model.lora.r=4", "--preset=8gb", "--seed", "3"])
    assert rest == ["--model.lora.r=4", "--seed", "3"]
    words = [*presets.flags(found), *rest]
    config, _ = parse(importlib.import_module(cli.STAGES["sft"].module).Config, words, prog="x")
    assert (config.model.lora.r, config.model.load_in_4bit) == (4, True)


def test_an_unknown_preset_is_one_line(capsys):
    assert cli.main(["--stage", "sft", "--preset", "9gb"]) == 2
    assert "--preset 9gb: choose cpu, 8gb" in capsys.readouterr().err


SHAPES = {"0.5B": (896, 4864, 24, 14, 2, 151936, True), "3B": (2048, 11008, 36, 16, 2, 151936, True),
          "7B": (3584, 18944, 28, 28, 4, 152064, False), "14B": (5120, 13824, 48, 40, 8, 152064, False),
          "32B": (5120, 27648, 64, 40, 8, 152064, False)}


def shape(folder, size: str) -> str:
    """The configuration of a Qwen2.5 model; --plan reads nothing else."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "vocab_size", "tie_word_embeddings")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(zip(names, SHAPES[size], strict=True)) | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768}))
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, row in presets.CARDS.items() if row.gib])
def test_the_size_that_a_card_is_said_to_hold_fits_by_plan(tmp_path, name):
    from hybrid_rlhf.memory_plan.amounts import Cards
    from hybrid_rlhf.training import memory_options, step3_ppo

    row, folder = presets.CARDS[name], shape(tmp_path / "m", presets.CARDS[name].fits)
    config, _ = parse(step3_ppo.Config, [
        *presets.flags(name), f"--model.model_name_or_path={folder}", "--model.dtype=bfloat16",
        f"--roles.reward.model_name_or_path={folder}", "--data.max_prompt_length=512",
        "--ppo.sampling.max_new_tokens=512", "--train.per_device_train_batch_size=8"], prog="x")
    plan, = memory_options.plans_of(config, memory_options.Place.of(Cards(1, 1, row.gib << 30)))
    assert plan.short <= 0, f"{plan.peak / 2**30:.1f} GiB in {plan.peak_phase}"
    assert dataclasses.replace(plan, available=None).peak > 0.3 * row.gib * 2**30 * (row.gib < 40)


@pytest.mark.parametrize(("name", "gib", "warning"), [
    ("24gb", None, "--preset 24gb is for a card of 24 GiB, and torch finds none here; this machine's is cpu"),
    ("48gb", 23.6, "--preset 48gb is for a card of 48 GiB, and this one has 24; this machine's is 24gb"),
    ("24gb", 23.6, None), ("8gb", 79.2, None), ("cpu", None, None), ("cpu", 23.6, None)])
def test_a_preset_for_a_card_that_is_not_there_is_said(name, gib, warning):
    assert presets.mismatch(name, gib) == (warning and f"warning: {warning}")


def test_a_run_says_so_before_it_begins(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_run", lambda *_inputs, **_named: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name, is_said in (("24gb", True), ("cpu", False)):
        assert cli.main([*short_sft(tmp_path), "--preset", name, "--model.load_in_4bit", "false"]) == 0
        assert (f"warning: --preset {name}" in capsys.readouterr().err) == is_said
