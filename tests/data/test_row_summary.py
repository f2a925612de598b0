"""What became of the rows is told at the start of every run; a file that is named is used whole."""

from __future__ import annotations

import json
import socket
import time

import pytest

from hybrid_rlhf.cli import main
from hybrid_rlhf.core import hub
from hybrid_rlhf.data import datasets
from hybrid_rlhf.data.datasets import DataConfig, summary
from hybrid_rlhf.training.registry import READS
from tests.factories.stage_options import used
from tests.factories.tiny import chatml_tokenizer, own_cache, save_tiny

WORDS = [f"{a} {b}" for a in ("red", "blue", "green", "cat", "dog", "sun") for b in range(10)]
LENGTHS = ["--data.max_length", "64", "--data.max_prompt_length", "32"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    save_tiny(folder / "model")
    answers = {"demos": lambda w: {"prompt": f"say {w}", "completion": w}, "prompts": lambda w: {"prompt": f"say {w}"},
               "pairs": lambda w: {"prompt": f"say {w}", "chosen": w, "rejected": "no"}}
    for name, row in answers.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row(w)) + "\n" for w in WORDS))
    (folder / "few.jsonl").write_text("".join(json.dumps({"prompt": f"say {w}"}) + "\n" for w in WORDS[:7]))
    (folder / "score.py").write_text("def length(completions):\n    return [float(len(c)) for c in completions]\n")
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    own_cache(monkeypatch, tmp_path / "cache")


def run(place, stage: str, source: str, *more: str) -> None:
    assert main(["--stage", stage, "--output_dir", f"{place}/{stage}", *used(stage, LENGTHS),
                 "--data.sources", f"{place}/{source}", "--model.dtype", "float32",
                 *(word.replace("PLACE", str(place)) for word in more)]) == 0


TRAIN = ["--model.model_name_or_path", "PLACE/model", "--train.max_steps", "1", "--train.num_fixed_prompts", "0",
         "--resume", "never"]


def test_a_file_for_one_stage_is_trained_on_whole_and_the_run_begins_with_the_count(place, capsys) -> None:
    run(place, "sft", "demos.jsonl", *TRAIN, "--data.eval_fraction", "0")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("data:", "warning:", "note:"))]
    assert lines == ["data: 60 rows read, 60 to train on, 0 held out",
                     "data: 60 prompts of plain text rendered as user turns (data.raw true keeps them as they are)"]


@pytest.mark.parametrize("packing", ["false", "true"])
def test_every_row_of_an_epoch_is_trained_with_the_last_step_on_those_that_are_left(place, capsys, packing) -> None:
    """60 rows in batches of 16 are 4 steps, the last with 12; transformers' Trainer makes 6 of 1.5 epochs too."""
    run(place, "sft", "demos.jsonl", *TRAIN[:2], "--train.num_fixed_prompts", "0", "--data.eval_fraction", "0",
        "--train.num_train_epochs", "1.5", "--train.per_device_train_batch_size", "4", "--resume", "never",
        "--train.gradient_accumulation_steps", "4", "--data.packing", packing, "--train.optim", "sgd")
    text = capsys.readouterr().err
    assert "6 steps of 16 rows" in text and "the last step of each epoch has 12 rows" in text
    steps = [json.loads(line) for line in (place / "sft" / "metrics.jsonl").read_text().splitlines()]
    tokenizer = chatml_tokenizer()
    lengths = [len(tokenizer.apply_chat_template([{"role": "user", "content": f"say {w}"}, {
        "role": "assistant", "content": w}], return_dict=True)["input_ids"]) for w in WORDS]
    assert len(steps) == 6 and steps[3]["num_tokens"] == sum(lengths) - 60  # the line break behind the answer's end
    assert (steps[3]["epoch"], steps[5]["epoch"]) == (1, 1.5)


def test_weights_say_how_many_different_rows_an_epoch_has(place) -> None:
    sources = [{"path": f"{place}/demos.jsonl", "weight": 1.0}, {"path": f"{place}/pairs.jsonl", "weight": 3.0}]
    data = datasets.build(DataConfig(sources, eval_fraction=0), READS["sft"], chatml_tokenizer(), 0)
    assert summary(data.report)[0] == ("data: 120 rows read, 120 to train on, 0 held out (by weights: 90 different "
                                       "ones in an epoch, and others in the next)")
    assert len({place for epoch in range(2) for place in data.train.of_epoch(epoch).index}) == 120


def test_rows_that_a_split_leaves_to_other_stages_are_told_with_the_way_to_keep_them(place, capsys) -> None:
    run(place, "sft", "demos.jsonl", *TRAIN, "--data.split=[2, 4, 4]", "--data.eval_fraction", "0")
    first, _, second = [s for s in capsys.readouterr().err.splitlines() if s.startswith(("data:", "note:", "warning:"))]
    kept = int(first.split(" rows read, ")[1].split()[0])
    assert 0 < kept < 30 and first.endswith(f"{60 - kept} assigned to other stages")
    assert second.startswith(f"note: {60 - kept} of 60 rows") and "data.split null gives this stage every row" in second


def test_over_a_tenth_dropped_or_cut_is_a_warning_with_the_reasons_and_less_is_none() -> None:
    report = {"read": 100, "other_stages": 0, "truncated": 4, "train": 85, "held_out": 5, "usable": 85,
              "dropped": {"empty answer": 7, "longer than data.max_length": 3},
              "dropped_first": {"empty answer": ["a.jsonl row 2", "a.jsonl row 5", "b.jsonl row 1"]}}
    empty = "7 dropped: empty answer (a.jsonl row 2, a.jsonl row 5, b.jsonl row 1 and others)"
    assert summary(report) == [
        f"data: 100 rows read, 85 to train on, 5 held out, 4 truncated, {empty}, "
        "3 dropped: longer than data.max_length",
        f"warning: 14 of 100 rows (14%) are missing or cut in this stage: 4 cut to data.max_length; {empty}; "
        "3 dropped: longer than data.max_length"]
    assert summary(report, "ptx") == [line.replace("data:", "data of ptx:").replace("this stage", "ptx")
                                      for line in summary(report)]
    report |= {"truncated": 0, "dropped": {"empty answer": 10}}
    assert len(summary(report)) == 1  # a tenth exactly


def test_rows_left_out_by_max_samples_and_sources_without_use_are_told(place) -> None:
    tokenizer = chatml_tokenizer()
    config = DataConfig([f"{place}/pairs.jsonl", f"{place}/prompts.jsonl"], eval_fraction=0, max_samples=9)
    lines = summary(datasets.build(config, READS["reward"], tokenizer, 0).report)
    assert lines == ["data: 60 rows read, 9 to train on, 0 held out (chosen from 60 by weights and data.max_samples)",
                     "data: 60 prompts of plain text rendered as user turns (data.raw true keeps them as they are)",
                     f"data: nothing for this stage in {place}/prompts.jsonl"]


def test_one_file_gives_three_stages_their_shares_in_stage_all_alone() -> None:
    from hybrid_rlhf.training import all_stages, preferences, step1_sft, step2_reward, step3_ppo

    assert all_stages.Config().data.split == [2, 4, 4]
    assert [c.Config().data.split for c in (step1_sft, step2_reward, step3_ppo, preferences)] == [None] * 4


@pytest.mark.slow
def test_an_evaluation_on_few_prompts_warns(place, capsys) -> None:
    run(place, "evaluate", "few.jsonl", "--evaluate.models=[a=PLACE/model, b=PLACE/model]",
        "--reward.functions=PLACE/score.py:length", "--evaluate.sampling.max_new_tokens", "2")
    said = capsys.readouterr().err
    assert "evaluate: 7 of 7 prompts are asked (all)" in said and "warning: 7 prompts tell only very large" in said


@pytest.mark.slow
def test_prompts_that_a_model_was_trained_on_are_not_asked_unless_all_are_wanted(place, capsys) -> None:
    run(place, "sft", "demos.jsonl", *TRAIN, "--data.eval_fraction", "0.3")
    models = "--evaluate.models=[PLACE/sft, b=PLACE/model]"
    more = ["--reward.functions=PLACE/score.py:length", "--evaluate.sampling.max_new_tokens", "2",
            "--data.eval_fraction", "0.3"]
    capsys.readouterr()
    run(place, "evaluate", "demos.jsonl", models, *more)
    said = capsys.readouterr().err
    held_out = sum(datasets.is_held_out(f"say {w}", 0.3) for w in WORDS)
    assert f"evaluate: {held_out} of 60 prompts are asked (held out, for {place}/sft was trained on" in said
    run(place, "evaluate", "demos.jsonl", models, *more, "--evaluate.rows", "all", "--evaluate.num_prompts", "25")
    said = capsys.readouterr().err
    assert "evaluate: 25 of 60 prompts are asked (all)" in said and "warning" not in said
    assert json.loads((place / "evaluate" / "evaluate.json").read_text())["prompts"] == "25 (all)"


@pytest.mark.slow
def test_the_spread_of_scores_is_that_of_rows_that_the_reward_model_has_not_seen(place, capsys) -> None:
    run(place, "reward", "pairs.jsonl", *TRAIN, "--data.eval_fraction", "0.3")
    facts = json.loads((place / "reward" / "run.json").read_text())["facts"]
    held_out = sum(datasets.is_held_out(f"say {w}", 0.3) for w in WORDS)
    found = facts["score_statistics"]
    assert (found["on"], found["count"]) == ("both answers of held-out pairs", 2 * held_out)
    assert "will normalise scores" not in capsys.readouterr().err
    run(place, "reward", "pairs.jsonl", *TRAIN, "--data.eval_fraction", "0.05")
    few = sum(datasets.is_held_out(f"say {w}", 0.05) for w in WORDS)
    said = capsys.readouterr().err
    assert 0 < few < 8
    assert f"mean and spread of 60 pairs, training ones among them, for there are only {few} held-out" in said
    found = json.loads((place / "reward" / "run.json").read_text())["facts"]["score_statistics"]
    assert found["count"] == 120 and found["std"] > 0


def test_prompts_of_ppo_are_shown_before_there_is_a_reward_model(place, capsys) -> None:
    argv = ["--stage", "ppo", "--output_dir", f"{place}/ppo", "--data.sources", f"{place}/prompts.jsonl"]
    assert main([*argv, "--model.model_name_or_path", f"{place}/model", "--preview"]) == 0
    assert "ppo example 1: prompt of" in capsys.readouterr().out


@pytest.fixture
def no_network(monkeypatch):
    """No name is resolved, and each question asked of the network is counted."""
    asked = []

    def refuse(*given, **_):
        asked.append(given)
        raise socket.gaierror(-2, "Name or service not known")

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    import datasets.config
    import huggingface_hub.constants

    for module in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    hub.stay_offline_if_unreachable.cache_clear()
    yield asked
    hub.stay_offline_if_unreachable.cache_clear()


@pytest.mark.parametrize(("options", "said"), [
    (["--model.model_name_or_path", "some/model"], "some/model"),
    (["--model.model_name_or_path", "PLACE/model", "--data.max_length", "64", "--data.sources", "some/rows"],
     "data.sources: some/rows"),
])
def test_a_hub_id_without_a_network_fails_at_once_in_one_line(place, no_network, capsys, options, said) -> None:
    begin = time.perf_counter()
    argv = ["--stage", "sft", "--output_dir", f"{place}/hub", "--data.sources", f"{place}/demos.jsonl", *options]
    assert main([word.replace("PLACE", str(place)) for word in argv]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and "Retrying" not in error
    assert len(no_network) <= 2 and time.perf_counter() - begin < 28  # retries took half a minute a file
