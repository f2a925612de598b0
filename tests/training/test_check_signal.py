"""--check_signal through the launcher: what it says of tasks that cannot, can and need not be learned, and what it
leaves alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hybrid_rlhf.cli import main
from tests.factories.stage_options import COMMON, WORDS, used
from tests.factories.tiny import own_cache, save_tiny

PAY = """
def never(completions, **_):
    return [0.0] * len(completions)

def always(completions, **_):
    return [1.0] * len(completions)

def alternating(completions, **_):
    return [float(i % 2) for i in range(len(completions))]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("signal")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {w}"}) + "\n" for w in WORDS))
    (folder / "pay.py").write_text(PAY)
    save_tiny(folder / "base")
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        yield folder


def checked(place: Path, capsys, stage: str, function: str, *more: str) -> str:
    """What --check_signal prints on stdout."""
    assert main(["--stage", stage, "--check_signal", "--output_dir", str(place / "out"), *used(stage, COMMON),
                 "--model.model_name_or_path", f"{place}/base", f"--data.sources=[{{path: {place}/prompts.jsonl}}]",
                 "--train.per_device_train_batch_size", "2", f"--reward.functions={place}/pay.py:{function}",
                 *more]) == 0
    return capsys.readouterr().out


def test_a_reward_that_no_response_earns_is_said_to_be_out_of_reach_and_no_folder_is_made(place, capsys):
    out = checked(place, capsys, "grpo", "never", "--ppo.sampling.max_new_tokens", "4")
    count = min(32, len(WORDS))
    assert f"verdict: 0 of {count} prompts ever score above 0: no method can learn this" in out
    assert "pass@8 0%" in out and "a training step" in out and "one response" in out
    assert not (place / "out").exists()


@pytest.mark.parametrize(("stage", "options"), [
    ("ppo", ["--ppo.sampling.max_new_tokens", "4"]), ("online_dpo", ["--online.sampling.max_new_tokens", "4"]),
    ("rejection", ["--rejection.sampling.max_new_tokens", "4"])])
def test_every_stage_that_samples_draws_eight_responses_and_shows_the_best_the_median_and_the_worst(
        place, capsys, stage, options):
    lines = checked(place, capsys, stage, "alternating", *options).splitlines()
    count = min(32, len(WORDS))
    assert lines[0].split() == ["mean", "score", "0.5", "(pass@1", "50%)"]
    assert lines[1].startswith("best of 8") and "1 (pass@8 100%)" in lines[1]
    assert lines[2].endswith(f"on {count} of {count} prompts")
    assert [line for line in lines if line in ("best", "median", "worst")] == ["best", "median", "worst"]
    assert any(line.startswith("completion: ") and "(score 1)" in line for line in lines)
    assert not (place / "out").exists()


def test_the_verdict_comes_before_the_step_and_a_large_step_is_measured_on_a_part_of_its_prompts(place, capsys):
    rows = place / "many.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"say {w} {i}"}) + "\n" for w in WORDS for i in range(8)))
    lines = checked(place, capsys, "grpo", "alternating", "--ppo.sampling.max_new_tokens", "4", "--train.max_steps",
                    "3", "--train.per_device_train_batch_size", "32", f"--data.sources=[{{path: {rows}}}]").splitlines()
    assert lines[-3].startswith("verdict: ") and not lines[-2]
    assert re.fullmatch(r"a training step +about [\d.]+ s \(measured on 24 of its 32 prompts\); the run has 3: "
                        "about .*", lines[-1])


def test_a_task_that_is_solved_is_said_to_be(place, capsys):
    assert "verdict: solved: every response scores 1" in checked(place, capsys, "rloo", "always",
                                                                 "--ppo.sampling.max_new_tokens", "4")


def test_a_stage_that_does_not_sample_refuses_the_switch(place, capsys):
    assert main(["--stage", "sft", "--check_signal", "--model.model_name_or_path", f"{place}/base"]) == 2
    assert capsys.readouterr().err.startswith("error: --check_signal is for stages that sample")


def test_the_report_of_a_run_begins_with_what_its_first_rollout_scored(place, capsys):
    out = place / "run"
    assert main(["--stage", "grpo", "--output_dir", str(out), *used("grpo", COMMON), "--train.max_steps", "2",
                 "--model.model_name_or_path", f"{place}/base", f"--data.sources=[{{path: {place}/prompts.jsonl}}]",
                 "--train.per_device_train_batch_size", "2", f"--reward.functions={place}/pay.py:alternating",
                 "--ppo.sampling.max_new_tokens", "4", "--ppo.sampling.num_samples", "4"]) == 0
    text = (out / "report.md").read_text()
    first = "Before the first update, mean score: 0.5; best of 4: 1, mean over prompts"
    assert text.index(first) < text.index("Alarms")
    assert "Verdict: none of the responses end by themselves" in text
    assert "Before the first update, mean score: 0.5" in (out / "report.html").read_text()
