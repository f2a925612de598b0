"""What a run says: plain lines into a pipe, a live table on a terminal, and never a control character of a model's."""

from __future__ import annotations

import io
import re
import time

import pytest
import torch
from rich.console import Console

from hybrid_rlhf.core import activity
from hybrid_rlhf.report import terminal
from hybrid_rlhf.report.summary import html
from hybrid_rlhf.report.terminal import Progress, last_turn, sample_lines

KEYS = ("reward", "kl", "completions/mean_length")
VALUES = {"reward": 0.123456, "kl": 2.0, "completions/mean_length": 13.25, "other": 9.0}
EVIL = {"prompt": "a\n b", "completion": "\x1b]0;owned\x07\x1b[2Jhi\u202e\x9b31m [red]x[/] :smile:", "score": 1.25}


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def watched(monkeypatch, width: int = 80) -> None:
    """As if a person sat at a terminal of that width."""
    for name, value in {"TTY_COMPATIBLE": "1", "COLUMNS": str(width), "LINES": "24", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)


def test_metrics_of_one_last_part_are_told_apart_in_the_line_of_held_out_rows(capsys, clock):
    with Progress("dpo", ("rewards/margins",), 3) as progress:
        progress.evaluated(3, {"eval/loss": 0.5, "eval/rewards/chosen": 0.25, "eval/logps/chosen": -18.5})
    assert "held out: loss 0.5  rewards/chosen 0.25  logps/chosen -18.5" in capsys.readouterr().err


def test_into_a_pipe_go_plain_lines_and_nothing_to_stdout(capsys, clock):
    with Progress("ppo", KEYS, 10) as progress:
        for step in (1, 2):
            clock[0] += 30
            progress.step(step, VALUES, is_logged=step == 2, samples=[EVIL])
        progress.evaluated(2, {"eval/kl": 1.5, "eval/reward": 0.5, "eval/objective/kl": 1.5, "eval/x/std": 0.25})
    out, err = capsys.readouterr()
    assert out == ""
    once, first, second, last = err.splitlines()
    assert once == "ppo 1/10  reward 0.1235  kl 2  mean_length 13.25  4:30 left", "the first step, logged or not"
    assert first == "ppo 2/10  reward 0.1235  kl 2  mean_length 13.25  4:00 left"
    assert second == "ppo 2/10  held out: reward 0.5  kl 1.5  x/std 0.25", "kl is said once"
    assert last.startswith("ppo: 2 steps in 1:00, ") and last.endswith("iB of memory at most")


def test_a_long_line_is_not_folded_in_a_pipe(capsys):
    keys = tuple(f"quite_a_long_name_{i}" for i in range(12))
    with Progress("ppo", keys, 2) as progress:
        progress.step(1, dict.fromkeys(keys, 1.0), is_logged=True)
    assert "quite_a_long_name_11 1" in capsys.readouterr().err.splitlines()[0]


def test_a_terminal_gets_a_table_whose_columns_line_up(capsys, monkeypatch):
    watched(monkeypatch)
    with Progress("ppo", KEYS, 10) as progress:
        progress.step(1, VALUES, is_logged=True, samples=[EVIL])
        progress.step(5, VALUES | {"reward": -12345.678}, is_logged=True)
        progress.evaluated(5, {"eval/kl": 0.5, "eval/reward": 0.75})
    rows = [line for line in plain(capsys.readouterr().err) if line.endswith(("mean_length", "13.25", " 0.5"))]
    assert "    step      reward          kl mean_length" in rows
    assert "       1      0.1235           2       13.25" in rows
    assert "       5  -1.235e+04           2       13.25" in rows
    assert "held out        0.75         0.5" in [line.rstrip() for line in rows]


def plain(text: str) -> list[str]:
    """Terminal output without its colours and cursor movements."""
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").splitlines()]


def test_below_the_table_live_the_step_the_sample_and_the_time_left(monkeypatch, clock):
    watched(monkeypatch)
    progress = Progress("ppo", KEYS, 8)
    progress._columns = KEYS
    clock[0] += 40
    progress.step(1, VALUES, is_logged=False)
    clock[0] += 20
    progress.step(2, VALUES, is_logged=False)
    progress._samples = [EVIL]
    progress._hear("sampling")
    progress.announce("finishing")
    screen = Console(file=io.StringIO(), width=80, force_terminal=False)
    screen.print(progress._frame())
    row, prompt, completion, bar, now, notice = screen.file.getvalue().rstrip().splitlines()
    assert row.split() == ["2", "0.1235", "2", "13.25"]
    assert prompt.strip() == "prompt: a b"
    assert completion.strip() == "completion: ␛]0;owned␇␛[2Jhi<U+202E><U+009B>31m [red]x[/] :smile:  (score 1.25)"
    assert bar.startswith("ppo ") and bar.rstrip().endswith("2/8 1:00 passed, 2:00 left"), "6 steps of 20 s"
    assert now.strip() == "sampling"
    assert notice.strip() == "finishing"


def test_no_control_character_of_a_sample_reaches_a_watched_terminal(capsys, monkeypatch):
    watched(monkeypatch)
    with Progress("ppo", KEYS, 2) as progress:
        progress.step(1, VALUES, is_logged=True, samples=[EVIL])
        err, end = "", time.monotonic() + 30
        while "completion: " not in err:  # the live part is drawn four times a second
            assert time.monotonic() < end, "the sample was not shown"
            time.sleep(0.05)
            err += capsys.readouterr().err
    err += capsys.readouterr().err
    assert "\x1b]0;" not in err and "\x1b[2J" not in err and "\x9b" not in err and "\u202e" not in err


def test_time_left_is_the_smaller_of_what_steps_and_max_seconds_leave(clock):
    progress = Progress("sft", KEYS, 10, max_seconds=50.0)
    assert progress.pace.seconds_left() == 50.0
    clock[0] += 15
    progress.step(1, VALUES, is_logged=False)
    assert progress.pace.seconds_left() == 35.0  # of the first step alone nothing is concluded
    clock[0] += 5
    progress.step(2, VALUES, is_logged=False)
    assert progress.pace.seconds_left() == 30.0  # 8 steps of 5 s would take 40
    clock[0] += 12
    progress.step(8, VALUES, is_logged=False)
    assert progress.pace.seconds_left() == pytest.approx(2 * 17 / 7)  # 7 steps took 17 s
    clock[0] += 100
    assert progress.pace.seconds_left() == 0.0


def test_what_the_process_is_doing_is_heard_while_the_run_lasts():
    with Progress("ppo", KEYS, 2) as progress:
        assert [(number, progress._doing) for number in activity.epochs(2)] == [
            (1, "training, epoch 1 of 2"), (2, "training, epoch 2 of 2")]
        progress.step(1, VALUES, is_logged=False)
        assert progress._doing == ""
    activity.doing("afterwards")
    assert progress._doing == ""


def test_a_narrow_terminal_gets_the_first_columns():
    assert terminal.fitting(KEYS, 200) == KEYS
    assert terminal.fitting(KEYS, 40) == ("reward", "kl")  # 8 + 12 + 12 = 32, and 12 more do not fit
    assert terminal.fitting(KEYS, 5) == ()


@pytest.mark.parametrize(("seconds", "text"), [
    (0, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (65, "1:05"), (3599.7, "1:00:00"), (7209, "2:00:09"),
    (float("inf"), "?"), (float("nan"), "?"),
])
def test_durations_read_as_people_say_them(seconds, text):
    assert terminal.duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (100, "2 minutes"), (840, "14 minutes"),
                                               (5340, "89 minutes"), (7500, "2 h 5 min")])
def test_an_estimate_reads_as_people_say_it(seconds, text):
    assert terminal.roughly(seconds) == text


@pytest.mark.parametrize(("value", "text"), [
    (1234567.0, "1234567"), (0.00005, "5e-05"), (0.123456, "0.1235"), (-3.0, "-3"), (float("nan"), "nan"),
    (float("-inf"), "-inf"), (1e12, "1e+12"), (7, "7"),
])
def test_numbers_have_four_digits_and_counts_all_of_them(value, text):
    assert terminal.number(value) == text


def test_memory_is_in_binary_units():
    assert terminal.memory(512 * 2**20) == "512 MiB" and terminal.memory(1.5 * 2**30) == "1.5 GiB"
    assert terminal.peak_bytes() > 10 * 2**20


def test_a_line_is_cut_by_columns_not_by_characters():
    assert terminal.one_line("abcdef", 6) == "abcdef"
    assert terminal.one_line("abcdefg", 6) == "abcde…"
    assert terminal.one_line("猫猫猫猫", 6) == "猫猫…"  # two columns each


def test_a_response_that_is_empty_or_did_not_end_says_so_however_long_it_is():
    assert terminal.sample_lines({"prompt": "p", "completion": " \n"}, 40) == ["    prompt: p", "completion:  (empty)"]
    assert terminal.sample_lines({"completion": "x" * 90, "score": 0.5, "ended": False}, 50) == [
        "completion: xxxxxxxxx…  (score 0.5)  (did not end)"]  # 12 + 10 + 13 + 15 columns
    assert terminal.sample_lines({"completion": "x", "ended": True}, 50) == ["completion: x"]
    assert terminal.sample_lines({"prompt": "x" * 90 + " What is 7?"}, 24) == ["    prompt: … What is 7?"]
    long = {"prompt": "<|system|> You are a helpful assistant. <|user|> What is 7 + 12?"}
    assert terminal.sample_lines(long, 40) == ["    prompt: What is 7 + 12?"]
    assert len(terminal.sample_lines({"prompt": "猫" * 50 + "?"}, 30)[0]) <= 30 and len(long["prompt"]) > 40


def test_the_summary_has_a_column_for_every_key_and_no_row_is_lost(capsys):
    terminal.summary_table([{"model": "sft", "score": 0.5, "kl": 0.0, "seconds": 61.25},
                            {"model": "[bold]ppo", "accuracy": 1.0, "score": -0.25, "kl": 12.5}], title="Held out")
    lines = capsys.readouterr().out.splitlines()
    cells = [[c.strip() for c in re.split("[│┃]", line)[1:-1]] for line in lines if line.startswith(("│", "┃"))]
    assert lines[0].strip() == "Held out"
    assert cells == [["model", "score", "kl", "seconds", "accuracy"], ["sft", "0.500", "0.0", "61.2", ""],
                     ["[bold]ppo", "-0.250", "12.5", "", "1.000"]]


def test_the_live_view_says_where_the_time_went_and_who_holds_the_memory(monkeypatch):
    values = {"time/step": 0.8, "time/train": 0.6, "time/generate": 0.1, "time/switch": 0.0,
              "engine/tokens_per_second": 12345.6, "memory/actor/train": 3 * 2**20, "memory/actor/generate": 2**20,
              "memory/ref/score": 2**30}
    assert terminal.time_shares(values) == "12346 tokens/s; of 0.8 s: train 75%, generate 12%"
    assert terminal.memory_by_role(values) == "memory: 1.0 GiB", "on a CPU it is the process's, whoever computes"
    monkeypatch.setattr(terminal, "device", lambda: torch.device("cuda"))
    assert terminal.memory_by_role(values) == "memory: actor 3 MiB (train), ref 1.0 GiB (score)"
    assert (terminal.time_shares({}), terminal.memory_by_role({})) == ("", "")


CHATML = ("<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello."
          "<|im_end|>\n<|im_start|>user\nWhat is <b>2</b>\n+ 3?<|im_end|>\n<|im_start|>assistant\n")
PROMPTS = {  # as published templates write them
    CHATML: "What is <b>2</b>\n+ 3?",
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n": "Why?",
    "<bos><start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n": "Why?",
    "<s>[INST] Hi [/INST] Hello.</s>[INST] Why? [/INST]": "Why?",
    "<|user|>System failure: why?</s>\n<|assistant|>\n": "System failure: why?",
    "<|user|>\nWhy?</s>\n<|assistant|>\n": "Why?",
    "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Why?\n\nAssistant:": "Why?",
    "Once upon a time": "Once upon a time", " user of 2 < 3\n": " user of 2 < 3\n", "": "",
    "<|im_start|>user\n<|vision_start|>[a.png]<|vision_end|>Why?<|im_end|>\n<|im_start|>assistant\n": "[a.png]Why?",
    "<|im_start|>assistant\n": "<|im_start|>assistant\n"}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_last_turn_is_what_was_asked(prompt):
    assert last_turn(prompt) == PROMPTS[prompt]


def test_samples_on_the_terminal_and_in_the_report_begin_with_it():
    assert sample_lines({"prompt": CHATML}, 60) == ["    prompt: What is <b>2</b> + 3?"]
    page = html("t", [], [{"prompt": CHATML, "answer": "5"}])
    assert "<summary>What is &lt;b&gt;2&lt;/b&gt;\n+ 3?</summary>&lt;|im_start|&gt;system" in page
