"""PPO paid by functions, with and without a reward model, through the launcher."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import methods
import pytest
from methods_settings import OF_PROMPTS

from hybrid_rlhf.cli import main
from tests.factories.tiny import save_tiny, tiny_scalar_model, tiny_tokenizer

WORDS = ["red", "blue", "green sea", "cat", "a small dog", "fox", "sun", "the moon", "tree", "old book"]
COMMON = ["--stage", "ppo", "--model.dtype", "float32", "--data.split", "null", "--data.eval_fraction", "0",
          "--data.max_prompt_length", "32", "--train.max_steps", "3", "--train.per_device_train_batch_size", "4",
          "--train.logging_steps", "1", "--ppo.sampling.max_new_tokens", "6", "--ppo.num_ppo_epochs", "1",
          "--roles.actor.learning_rate", "1e-3", "--train.save_steps", "1"]
CRITIC = ["--roles.critic.learning_rate", "1e-3"]
FILE = """
import pathlib

calls = pathlib.Path(__file__).with_name("calls")

def pays(prompts, completions, answer, **columns):
    assert len(prompts) == len(completions) == len(answer) and set(columns) == {"completion_ids", "level"}
    assert all(p == f"say {a}" for p, a in zip(prompts, answer))
    return [len(c) / 10 for c in completions]

def skips(completions, level, **_):
    return [None if n % 2 else 1.0 for n in level]

def fails_at_step_3(completions, **_):
    with calls.open("a") as file:
        file.write("x")
    if len(calls.read_text()) == 3:
        return [0.5, 0.5, float("nan"), 0.5]
    return [len(c) / 10 for c in completions]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    rows = [{"prompt": f"say {w}", "answer": w, "level": i} for i, w in enumerate(WORDS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "pay.py").write_text(FILE)
    model = tiny_scalar_model()
    model.config.pad_token_id = 0
    model.save_pretrained(folder / "judge")
    tokenizer = tiny_tokenizer()
    save_tiny(folder / "base", template=False)
    tokenizer.save_pretrained(folder / "judge")

    def launch(out: str, *more: str, code: int = 0) -> list[dict]:
        argv = [*COMMON, *(CRITIC if "grpo" not in more else []), "--output_dir", f"{folder}/{out}",
                f"--data.cache_dir={folder}/cache",
                f"--data.sources=[{{path: {folder}/rows.jsonl}}]", "--model.model_name_or_path", f"{folder}/base"]
        assert main([*argv, *(m.replace("PLACE", str(folder)) for m in more)]) == code
        lines = Path(folder / out / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "engine/", "memory/"))}
                for line in lines]

    return SimpleNamespace(folder=folder, launch=launch)


def test_ppo_with_functions_alone_needs_no_reward_model_and_sees_every_column(place) -> None:
    rows = place.launch("alone", "--reward.functions=[PLACE/pay.py:pays, PLACE/pay.py:skips]",
                        "--reward.weights=[2, 0.5]")
    for row in rows[:3]:
        assert row["rewards/skips/mean"] == 1.0 and row["rewards/skips/std"] == 0.0
        scored = (row["reward"] - 2 * row["rewards/pays/mean"]) / 0.5  # the share that `skips` scored
        assert scored == pytest.approx(round(scored * 4) / 4, abs=1e-5) and 0 <= scored <= 1
        assert "rewards/model/mean" not in row and row["value/loss"] > 0
    record = json.loads((place.folder / "alone" / "run.json").read_text())
    assert record["status"] == "finished" and (place.folder / "alone" / "model" / "model.safetensors").exists()


def test_one_function_is_given_as_one_word_and_one_base_serves_the_three_roles(place, capfd) -> None:
    rows = place.launch("lora", "--reward.functions", "PLACE/pay.py:pays", "--model.lora.r", "4")
    assert rows[0]["reward"] == pytest.approx(rows[0]["rewards/pays/mean"])
    assert "share_base" not in capfd.readouterr().err  # nothing had to be left out


def test_classifiers_pay_a_run_without_a_critic_too(place) -> None:
    rows = place.launch("judges", "--reward.models", "PLACE/judge", "--reward.functions", "PLACE/pay.py:pays",
                        "--reward.weights=[2, -1]", "--stage", "grpo", "--ppo.sampling.num_samples", "2")
    first = rows[0]
    assert first["reward"] == pytest.approx(2 * first["rewards/pays/mean"] - first["rewards/judge/mean"], abs=1e-5)
    assert first["rewards/judge/std"] > 0 and "value/loss" not in first


def test_a_run_that_a_source_stopped_has_trained_nothing_on_it_and_the_same_command_finishes_it(place, capfd) -> None:
    given = ["--reward.functions", "PLACE/pay.py:fails_at_step_3"]
    rows = place.launch("failed", *given, code=2)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert len(said) == 1 and "fails_at_step_3: score nan for response 2" in said[0] and len(rows) == 2
    record = json.loads((place.folder / "failed" / "run.json").read_text())
    assert record["status"] == "failed" and "response 2" in record["error"]
    saved = sorted(p.name for p in (place.folder / "failed" / "checkpoints").iterdir())
    assert len(saved) == 2 and saved[-1].endswith("2")  # the steps before it, and not the one that failed
    resumed = place.launch("failed", *given)
    whole = place.launch("whole", *given)
    assert len(resumed) == 3 and [r["reward"] for r in resumed] == [r["reward"] for r in whole]
    weights = [(place.folder / out / "model" / "model.safetensors").read_bytes() for out in ("failed", "whole")]
    assert weights[0] == weights[1]


def test_a_function_of_one_s_own_that_is_given_messages_is_told_so_in_a_line(capsys):
    from hybrid_rlhf.rewards.functions import FunctionSource, open_functions
    from hybrid_rlhf.training.reward_sources import check_columns

    own = FunctionSource("polite", lambda completions: [0.0] * len(completions))
    check_columns([own], {"prompt": "say red", "prompt_ids": [1]})
    check_columns(open_functions(["builtin:numeric_match"], {}, 1.0), {"prompt": [{"role": "user"}], "answer": "1"})
    assert capsys.readouterr().err == ""
    check_columns([own], {"prompt": [{"role": "user", "content": "say red"}]})
    assert "polite get completions as lists of one message" in capsys.readouterr().err


# -- Reward hacking is seen and can be prevented -----------------------------------------------------------------------


def words(folder: str, seed: int, kl_coef: float) -> list[str]:
    """The demo's own settings of stage 3, but for the KL coefficient and 150 steps; the checker has weight 0."""
    return ["--stage", "ppo", "--seed", str(seed), *OF_PROMPTS, "--data.sources=[{path: demo/prompts}]",
            "--train.max_steps=150", "--train.per_device_train_batch_size=128", "--train.warmup_ratio=0.05",
            "--train.max_eval_batches=1", "--roles.actor.learning_rate=1e-3", "--roles.critic.learning_rate=2e-3",
            "--ppo.num_ppo_epochs=2", "--ppo.num_minibatches=2", "--ppo.missing_eos_penalty=1.0",
            "--ppo.sampling.max_new_tokens=16", f"--ppo.kl_coef={kl_coef}",
            f"--roles.ref.model_name_or_path={folder}/sft", f"--roles.reward.model_name_or_path={folder}/reward",
            "--reward.functions=builtin:demo_correct", "--reward.weights=[1.0, 0.0]"]


def ends(folder) -> tuple[dict, dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward" in row]
    return steps[0], next(row for row in reversed(rows) if "eval/reward" in row)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_without_a_kl_price_the_reward_model_is_fooled_and_the_report_says_so_with_it_neither(learned, kl_coef) -> None:
    folder = learned / f"hacking{kl_coef}"
    # without a bound of the score: on some processors it rises beyond the default one, of which an alarm tells
    methods.launch([*words(str(learned), 0, kl_coef), *["--ppo.score_clip=null"] * bool(kl_coef)], folder)
    (first, last), report = ends(folder), (folder / "report.md").read_text()
    score, truth = "rewards/model/mean", "rewards/demo_correct/mean"
    assert last[f"eval/{score}"] > first[score] + 2
    if kl_coef:
        assert last[f"eval/{truth}"] > first[truth] + 0.1
        assert "None of the alarms went off." in report
        return
    assert last[f"eval/{truth}"] < first[truth] - 0.1
    assert "- **reward hacking**: the training score rose from" in report and "while demo_correct fell from" in report
    assert "- **KL**: the policy is" in report
