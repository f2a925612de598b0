"""`hybrid-rlhf qualify`: dry on the processor and on the simulated card; faults are planted and found."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from hybrid_rlhf import cli, kernels
from hybrid_rlhf.commands import doctor, qualify, qualify_numbers, qualify_page, qualify_speed
from hybrid_rlhf.commands.qualify import PARTS, Part
from hybrid_rlhf.commands.qualify_page import WRONG, Row, State, Task
from hybrid_rlhf.commands.qualify_speed import card_rates
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.kernels import reference
from hybrid_rlhf.kernels.ops import Fused
from hybrid_rlhf.memory_plan.amounts import Cards
from hybrid_rlhf.memory_plan.plan import Line, Plan
from hybrid_rlhf.memory_plan.rates import CARDS, Calibration, rates_of_card, read_calibration, read_rates
from hybrid_rlhf.training import memory_options
from tests.factories.tiny import own_cache
from tests.simulated_card import simulated_card

MIB, GIB = 2**20, 2**30
RUNS = ("grpo-qlora", "ppo-qlora", "grpo", "ppo")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder to be in, with a cache of its own; however full the disk is."""
    own_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(doctor, "FEW_GIB", dict.fromkeys(doctor.FEW_GIB, 0))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def task(place):
    return Task("equality", True, place, place / "log", time.monotonic() + 600)


@pytest.fixture
def kernels_only(monkeypatch):
    """Without the checks of the engine."""
    for name in ("_greedy", "_drift"):
        monkeypatch.setattr(qualify_numbers, name, lambda *_given, **_named: (State.PASSED, ""))


def only(*parts):
    """How qualify runs these parts here and no others."""
    return lambda task: qualify.rows_of(task) if task.name in parts else iter(())


def rows_in(folder):
    return [Row(**row) for row in json.loads((folder / "qualify.json").read_text())["rows"]]


def states(rows):
    return {(row.part, row.name): row.state for row in rows}


def wrong(rows):
    return [(row.name, row.detail) for row in rows if row.state in WRONG]


# -- whole commands ----------------------------------------------------------------------------------------------------


def test_a_dry_run_without_a_card_checks_numbers_and_says_that_it_was_dry(place, capsys):
    assert qualify.main(["--dry_run"], only("environment", "equality", "speed")) == 0
    text, rows = (place / "qualify/qualify.md").read_text(), rows_in(place / "qualify")
    assert text.startswith("# hybrid-rlhf qualify: no card\n\n**All ") and "This was a dry run" in text
    assert {row.part for row in rows} == {"environment", "equality", "speed"}
    assert sum(row.part == "equality" for row in rows) >= 12 and not wrong(rows)
    said = capsys.readouterr()
    assert said.out.splitlines()[1] == "page: qualify/qualify.md" and "equality: sampling: passed" in said.err
    assert sorted(p.name for p in (place / "qualify").iterdir()) == ["qualify.json", "qualify.log", "qualify.md"]
    assert not (place / "cache/calibration.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_part_passes_on_the_simulated_card(place):
    with simulated_card():
        assert qualify.main(["--dry_run"], qualify.rows_of) == 0, rows_in(place / "qualify")
    rows = rows_in(place / "qualify")
    assert not wrong(rows) and not [row for row in rows if row.state == State.SKIPPED]
    assert {(part, name) for part in RUNS for name in ("run", "memory")} <= {
        key for key, state in states(rows).items() if state == State.PASSED}
    assert all(row.numbers["predicted"] for row in rows if row.name == "time")
    assert states(rows)["grpo", "time"] == states(rows)["grpo", "beside tensors"] == State.NOTE
    assert not (place / "cache/calibration.json").exists()
    assert "simulated card" in (place / "qualify/qualify.md").read_text().splitlines()[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_runs_dry_with_a_process_for_each_part(place):
    assert cli.main(["qualify", "--dry_run", "--output_dir", "here"]) == 0
    assert {row.part for row in rows_in(place / "here")} == set(PARTS) and not wrong(rows_in(place / "here"))
    assert "$ hybrid-rlhf --stage ppo" in (place / "here/qualify.log").read_text()


def test_without_a_card_it_is_one_line_and_exit_code_2(place, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["qualify"]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "no card that torch can use" in said.err and "--dry_run" in said.err
    assert said.out == "" and not (place / "qualify").exists()


@pytest.mark.parametrize("words", [["--minutes", "0"], ["--minutes", "nan"], ["--minute", "3"], ["--minutes", "x"]])
def test_wrong_flags_are_one_line_and_exit_code_2(place, capsys, words):
    assert cli.main(["qualify", "--dry_run", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# -- planted faults ----------------------------------------------------------------------------------------------------


def test_a_wrong_attention_kernel_is_found_and_named(place, kernels_only, monkeypatch):
    def attend(*given, scaling, **named):
        return reference.decode_attention(*given, scaling=1.02 * scaling, **named)

    right = kernels.ops_for("cpu")
    broken = right._replace(decode_attention=attend, decode_layer=None)
    monkeypatch.setattr(kernels, "ops_for", lambda _device: broken)
    assert qualify.main(["--dry_run"], only("equality")) == 1
    found = dict(wrong(rows_in(place / "qualify")))
    assert "attention, fp32" in found and "32 heads of 64 differ by" in found["attention, fp32"]
    text = (place / "qualify/qualify.md").read_text()
    assert "checks did not pass.**" in text and text.index("## What is wrong") < text.index("## Does it compute")


def other_tokens(*given, **named):
    tokens, logprobs = reference.sample(*given, **named)
    return (tokens + 1) % given[0].shape[-1], logprobs


def without_weight(x, weight, eps):
    return reference.rms_norm(x, 1 + 0 * weight, eps)


@pytest.mark.parametrize(("wrong_kernel", "row", "words"), [
    ({"sample": other_tokens}, "sampling", "300 words with no limits: 33 of 33 tokens are others"),
    ({"fused": Fused(without_weight, reference.gated, reference.rotary)}, "fused operations, fp32",
     "norm: results or gradients differ by up to ")], ids=["sampler", "norm"])
def test_a_wrong_sampler_or_norm_is_found_by_how_much_it_differs(task, kernels_only, monkeypatch, wrong_kernel, row,
                                                                 words):
    right = kernels.ops_for("cpu")
    monkeypatch.setattr(kernels, "ops_for", lambda _device: right._replace(**wrong_kernel))
    found = dict(wrong(PARTS["equality"].run(task)))
    assert words in found[row] and "gate" not in found[row]


def test_a_check_that_raises_is_a_row_and_the_others_go_on(task, kernels_only, monkeypatch):
    def attend(*_given, **_named):
        raise RuntimeError("CUDA error: misaligned address\nmore")

    right = kernels.ops_for("cpu")
    monkeypatch.setattr(kernels, "ops_for", lambda _device: right._replace(decode_attention=attend))
    rows = states(PARTS["equality"].run(task))
    assert rows["equality", "attention, fp32"] == State.FAILED and rows["equality", "sampling"] == State.PASSED
    assert "misaligned address" in task.log.read_text()


def plan_of(**sizes):
    """A plan whose actor takes so many MiB in each phase, beside 9 GiB of libraries."""
    phases = tuple(name.replace("_", " ") for name in sizes)
    own = {phase: size * MIB for phase, size in zip(phases, sizes.values(), strict=True)}
    return Plan("t", phases, (Line("actor", "weights", own),
                              Line("process", "libraries", dict.fromkeys(phases, 9 * GIB))), None)


METRICS = [{"memory/actor/generate": 900.0 * MIB, "memory/actor/score": 300.0 * MIB, "memory/ref/score": 500.0 * MIB,
            "memory/actor/update": 2000.0 * MIB}] * 2


@pytest.mark.parametrize("sizes, state, named", [
    (dict(generate=1000, score=600, train_actor=1900, step_actor=1500), State.PASSED, "training the actor"),
    (dict(generate=1000, score=600, train_actor=1500, step_actor=1200), State.DIFFERS, "training the actor"),
    (dict(generate=2600, score=600, train_actor=1900, step_actor=1500), State.DIFFERS, "generating"),
    (dict(generate=1000, score=200, train_actor=100, step_actor=1900), State.DIFFERS, "scoring")])
def test_memory_that_is_not_what_was_predicted_is_found(task, sizes, state, named):
    """Of 2000 MiB measured 1900 predicted is within a tenth, 1500 is not; 900 of 2600 is less than half."""
    with simulated_card():
        row = qualify_speed.memory_row(task, plan_of(**sizes), METRICS)
    assert row.state == state and named in row.detail
    assert row.numbers["measured"] == {"generate": 900 * MIB, "score": 500 * MIB, "actor/update": 2000 * MIB}
    assert row.numbers["predicted"]["actor/update"] == MIB * max(sizes["train_actor"], sizes["step_actor"])


def test_a_step_that_takes_more_than_three_times_as_long_as_predicted_differs(task, monkeypatch):
    monkeypatch.setattr(memory_options, "times_of", lambda *_: type("Time", (), {
        "phases": {"generate": 1.0, "score": 0.5, "train actor": 0.4, "step actor": 0.1}}))
    rates = rates_of_card(CARDS["3060"]).stored()
    for seconds, state in ((2.0, State.PASSED), (5.9, State.PASSED), (6.1, State.DIFFERS), (0.5, State.DIFFERS)):
        metrics = [{"time/generate": 99.0}, *[{"time/generate": seconds - 1, "time/score": 0.5, "time/train": 0.5}] * 2]
        row = qualify_speed.time_row(replace(task, is_dry=False, rates=rates), plan_of(generate=1), metrics)
        assert row.state == state, seconds
    assert row.numbers["predicted"] == {"generate": 1.0, "score": 0.5, "train": 0.5}


def test_numbers_that_are_not_finite_and_steps_that_are_missing_differ(task):
    fine = {"policy/loss": 0.1, "value/explained_variance": float("nan"), "engine/logprob_drift": 0.001}
    sizes = qualify_speed.Sizes(8, 128, 128)
    assert qualify_speed.run_row(task, "m", sizes, [fine] * 3).state == State.PASSED
    assert qualify_speed.run_row(task, "m", sizes, [fine] * 2).state == State.DIFFERS
    broken = qualify_speed.run_row(task, "m", sizes, [fine, fine | {"policy/loss": float("inf")}, fine])
    assert (broken.state, "not finite: policy/loss" in broken.detail) == (State.DIFFERS, True)
    drifting = qualify_speed.run_row(task, "m", sizes, [fine, fine, fine | {"engine/logprob_drift": 0.5}])
    assert drifting.state == State.DIFFERS


def test_a_run_that_ends_with_an_error_is_a_row_with_its_line(task, monkeypatch):
    make = qualify_speed.make_inputs
    monkeypatch.setattr(qualify_speed, "make_inputs", lambda task, *given: (
        make(task, *given), (task.folder / "prompts.jsonl").unlink())[0])
    (row,) = (r for r in PARTS["grpo"].run(replace(task, name="grpo")) if r.name == "run")
    assert row.state == State.FAILED and "exit code 2" in row.detail and "prompts.jsonl does not exist" in row.detail


# -- processes and time ------------------------------------------------------------------------------------------------


def dies(_task):
    yield Row("equality", "first", State.PASSED, "")
    os.abort()


def hangs(_task):
    time.sleep(60)
    yield


def child_rows(task, run, monkeypatch):
    """The rows of a part that a child process runs: it finds the function by name, as pickle has it."""
    monkeypatch.setattr(qualify, "_send_rows", partial(send_rows, run))
    return list(qualify.in_child(task))


def send_rows(run, task, sending):
    qualify.PARTS[task.name] = Part(run, 0, 0)
    send(task, sending)


send = qualify._send_rows


def test_a_process_that_dies_is_a_row_after_those_that_it_has_sent(task, monkeypatch):
    first, last = child_rows(task, dies, monkeypatch)
    assert first.name == "first" and last.state == State.FAILED
    assert "ended with signal SIGABRT after 1 rows" in last.detail


def test_a_process_whose_time_is_over_is_stopped(task, monkeypatch):
    began, short = time.monotonic(), replace(task, ends=time.monotonic() + 0.5)
    (row,) = child_rows(short, hangs, monkeypatch)
    assert row.state == State.FAILED and "stopped: not done after" in row.detail and time.monotonic() - began < 30
    (row,) = child_rows(replace(short, is_last=True), hangs, monkeypatch)
    assert (row.name, row.state) == ("the rest of it", State.SKIPPED)


def test_parts_without_time_are_left_out_with_a_line_and_what_there_is_was_saved(place, monkeypatch):
    saved = []

    def launch(task):
        yield task.row(task.name, State.PASSED, "x")

    monkeypatch.setattr(qualify, "PARTS", {n: Part(p.run, 1000 if n in RUNS else 0, 1) for n, p in PARTS.items()})
    monkeypatch.setattr(qualify, "_save", lambda *given, save=qualify._save: (
        save(*given), saved.append(len(rows_in(place / "qualify")))))
    with simulated_card():
        assert qualify.main(["--minutes", "10"], launch) == 0
    rows = rows_in(place / "qualify")
    assert [row.state for row in rows] == [State.PASSED] * 3 + [State.SKIPPED] * 4 and saved == [1, 2, 3, 4, 5, 6, 7]
    assert "4 were left out" in (place / "qualify/qualify.md").read_text().splitlines()[2]


def test_the_model_is_the_largest_that_fits_card_and_disk(task, monkeypatch):
    def chosen(case, free, disk, card=24):
        sizes = (int(free * GIB), card * GIB)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device=None: sizes)
        monkeypatch.setattr(qualify_speed.shutil, "disk_usage", lambda _path: type("U", (), {"free": disk * GIB}))
        return qualify_speed.choose_model(replace(task, is_dry=False), qualify_speed.CASES[case])

    assert chosen("ppo", 7.2, 100) == "Llama-134M shape"  # 36 bytes of 0.134e9 are 4.5 GiB, and 1.5
    assert chosen("ppo", 22.5, 100) == "Qwen2.5-0.5B shape"  # 16.4 GiB, and 1.5
    assert chosen("grpo-qlora", 22.5, 100) == "Qwen2.5-3B shape"
    assert chosen("grpo-qlora", 7.2, 100, card=8) == "Qwen2.5-1.5B shape"
    assert chosen("grpo-qlora", 7.2, 6) == "Qwen2.5-0.5B shape"  # 8 bytes of 1.54e9 are 11.5 GiB of disk
    with pytest.raises(UserError, match="the disk is too full: 5 GiB are needed"):
        chosen("grpo-qlora", 7.2, 3)
    with pytest.raises(UserError, match=r"too little of the card is free: 6.0 GiB are needed"):
        chosen("ppo", 4, 99)


# -- calibration and page ----------------------------------------------------------------------------------------------


def measured(name, /, **numbers):
    return Row("grpo", name, State.NOTE, "", numbers)


def test_a_calibration_is_within_its_bounds_and_the_plan_reads_it(place, monkeypatch):
    with simulated_card():
        rates = card_rates(torch.device("cuda", 0), torch.bfloat16, is_dry=True)
    rows = [measured("card", name="A Card"), measured("rates", rates=rates.stored()),
            measured("beside tensors", libraries_bytes=700 * MIB, fragmentation=0.04, is_exact=True),
            measured("beside tensors", libraries_bytes=500 * MIB, fragmentation=0.11, is_exact=True)]
    (place / "cache/calibration.json").write_text('{"fragmentation": 0.5, "theirs": 1}')
    qualify.calibrate(rows)
    assert read_calibration() == Calibration(700 * MIB, 0.11)
    assert json.loads((place / "cache/calibration.json").read_text())["theirs"] == 1
    assert read_rates("A Card") == rates and read_rates("Another") is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device=None: "A Card")
    found, source = memory_options.rates_for(torch.device("cuda"), None, torch.bfloat16)
    assert found == [rates] and "qualify measured on this card" in source
    assert memory_options.rates_for(torch.device("cuda"), Cards(1, 1, 24 * GIB, "4090"), torch.bfloat16)[0] != [rates]


def test_what_cannot_be_is_cut_and_what_others_may_hold_is_not_written(place):
    qualify.calibrate([measured("card", name="A Card"),
                       measured("beside tensors", libraries_bytes=9 * GIB, fragmentation=4.0, is_exact=False)])
    assert read_calibration() == Calibration(fragmentation=0.15)
    qualify.calibrate([measured("beside tensors", libraries_bytes=5, fragmentation=0.0, is_exact=True)])
    assert read_calibration() == Calibration(256 * MIB, 0.02)
    (place / "cache/calibration.json").unlink()
    qualify.calibrate([measured("card", name="A Card")])
    assert not (place / "cache/calibration.json").exists()


def test_the_page_says_first_what_is_wrong():
    rows = [Row("environment", "card", State.PASSED, "RTX 3060", {"name": "NVIDIA GeForce RTX 3060"}),
            Row("environment", "torch", State.PASSED, "2.13"), Row("equality", "sampling", State.DIFFERS, "a | b"),
            Row("ppo", "run", State.SKIPPED, "no time left")]
    text = qualify_page.page_of(rows, is_dry=False, minutes=9.5, version="1", when="today").splitlines()
    assert text[:4] == ["# hybrid-rlhf qualify: NVIDIA GeForce RTX 3060", "",
                        "**1 of 3 checks did not pass.** 1 was left out.", ""]
    assert text[4] == "## What is wrong" and text[8] == (
        "| Does it compute the right numbers?: sampling | differs | a \\| b |")
    assert "| as it should be |  | torch 2.13 |" in text
    assert qualify_page.verdict([]).startswith("**Nothing was checked.**")


def test_folders_of_the_user_are_not_in_what_is_sent(place, monkeypatch):
    monkeypatch.setenv("HOME", str(place / "someone"))

    def launch(task):
        yield task.row("run", State.FAILED, f"cannot read {place / 'someone/secret'} and {task.folder}")

    assert qualify.main(["--dry_run"], launch) == 1
    for name in ("qualify.md", "qualify.json"):
        text = (place / "qualify" / name).read_text()
        assert "~/secret" in text and str(place) not in text
