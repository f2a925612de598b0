"""Stages that sample, with tools and environments: from the command line, on a scripted model of Qwen2.5's template."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import hybrid_rlhf
from hybrid_rlhf.cli import main
from hybrid_rlhf.trainers.ppo import PPOTrainer
from tests.factories.counting import killed_at
from tests.factories.scripted import conversation, scripted_causal_lm
from tests.factories.times_tool import SCHEMA, TIMES, times
from tests.factories.tiny import own_cache
from tests.factories.trl_templates import tokenizer_of

END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "times", "arguments": {"a": 12, "b": 3}}\n</tool_call>'
CODE = '''
def times(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


class Game:
    def reset(self, **row):
        self.calls = 0

''' + TIMES + '''
    def get_reward(self) -> float:
        return float(self.calls)


def right(completions, environments=None, **_):
    assert environments is None or len(environments) == len(completions)
    return [float("36" in c[-1]["content"]) for c in completions]
'''


def asked(tokenizer, text: str) -> str:
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], tools=[SCHEMA], tokenize=False,
                                         add_generation_prompt=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A model that calls the tool half of the time, and else says something wrong; a file of tools; rows."""
    folder = tmp_path_factory.mktemp("episodes")
    tokenizer = tokenizer_of("qwen2_5")
    told = "\n<|im_start|>user\n<tool_response>\n36\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    prompt = asked(tokenizer, "What is 12 * 3?")
    talks = [conversation(tokenizer, prompt, CALL + END, told, "It is 36." + END),
             conversation(tokenizer, prompt, "It is 40." + END)]
    model = scripted_causal_lm(talks, vocab_size=len(tokenizer))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "acts.py").write_text(CODE)
    rows = [{"prompt": [{"role": "user", "content": "What is 12 * 3?"}], "number": i} for i in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        yield folder


def words(place: Path, stage: str, out: str, *more: str) -> list[str]:
    section = {"rejection": "rejection", "online_dpo": "online", "distill": "distill",
               "evaluate": "evaluate"}.get(stage, "ppo")
    more = (*more, f"--roles.teacher.model_name_or_path={place}/model") if stage == "distill" else more
    name = [] if stage == "evaluate" else ["--model.model_name_or_path", f"{place}/model", "--train.max_steps=2",
                                           "--train.per_device_train_batch_size=2", "--train.num_fixed_prompts=1",
                                           "--roles.actor.learning_rate=1e-6", "--engine.zero_stage=0"]
    return ["--stage", stage, "--output_dir", f"{place}/{out}", "--data.sources", f"[{place}/rows.jsonl]",
            "--data.max_prompt_length=600", "--model.dtype=float32", f"--{section}.sampling.max_new_tokens=150", *name,
            *more]


def metrics_of(folder: Path) -> dict[str, float]:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize("stage", ["grpo", "rejection", "distill"])
def test_a_stage_samples_episodes(place, stage, capsys):
    code = main(words(place, stage, stage, f"--environment.tools=[{place}/acts.py:times]",
                      f"--reward.functions=[{place}/acts.py:right]"))
    shown = capsys.readouterr()
    assert code == 0, shown.err[-2000:]
    assert re.search(r"tools: times \(\d+ tokens of each prompt\)", shown.err)
    found = metrics_of(place / stage)
    assert 0 < found["tools/call_frequency"] < 1 and found["tools/failure_frequency"] == 0
    assert found["reward"] == pytest.approx(found["tools/call_frequency"])  # right where it has called
    assert found["episodes/turns"] == pytest.approx(1 + found["tools/call_frequency"])
    samples = (place / stage / "samples.jsonl").read_text() if (place / stage / "samples.jsonl").exists() else ""
    page = (place / stage / "report.md").read_text() + samples
    assert "times(a=12, b=3)" in page or "It is 40." in page


def test_a_replay_of_episodes_asks_the_tools_again_and_says_so(place, capsys):
    """Scored by the run's own reward, each step has the mean that is on record."""
    assert main(words(place, "grpo", "tried", f"--environment.tools=[{place}/acts.py:times]",
                      f"--reward.functions=[{place}/acts.py:right]")) == 0
    capsys.readouterr()
    assert main(["replay", f"{place}/tried", "--reward", f"{place}/acts.py:right"]) == 0
    told = capsys.readouterr()
    assert "steps 1 to 2 are the same again" in told.out
    assert "the run asks tools and environments: it is the same again only if the same is answered" in told.err
    curves = json.loads((place / "tried_replay" / "replay.json").read_text())["curves"]
    rows = [json.loads(line) for line in (place / "tried" / "metrics.jsonl").read_text().splitlines()]
    assert [c["other"] for c in curves] == pytest.approx([r["reward"] for r in rows if "reward" in r])


@pytest.mark.slow
def test_an_environment_brings_its_own_reward_weighted_beside_functions(place, capsys):
    code = main(words(place, "grpo", "both", f"--environment.factory={place}/acts.py:Game",
                      f"--reward.functions=[{place}/acts.py:right]", "--reward.weights=[2.0, 0.5]"))
    assert code == 0, capsys.readouterr().err[-2000:]
    found = metrics_of(place / "both")
    assert found["rewards/Game/mean"] == found["tools/call_frequency"]
    assert found["reward"] == pytest.approx(2.5 * found["tools/call_frequency"])


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(place, capsys):
    more = [f"--environment.factory={place}/acts.py:Game", "--train.max_steps=4", "--train.save_steps=2",
            "--environment.num_workers=0", "--roles.actor.learning_rate=1e-4"]
    assert main(words(place, "grpo", "whole", *more)) == 0, capsys.readouterr().err[-2000:]
    with killed_at(PPOTrainer, 3):
        main(words(place, "grpo", "parts", *more))
    assert main(words(place, "grpo", "parts", *more)) == 0
    whole, parts = ((place / name / "model/model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts != (place / "model/model.safetensors").read_bytes()


def test_signal_is_measured_on_episodes(place, capsys):
    code = main([*words(place, "grpo", "signal", f"--environment.tools=[{place}/acts.py:times]",
                        f"--reward.functions=[{place}/acts.py:right]"), "--check_signal"])
    shown = capsys.readouterr()
    assert code == 0, shown.err[-2000:]
    assert "[assistant] times(a=12, b=3)" in shown.out and "It is 40." in shown.out
    assert re.search(r"calls of tools    0\.\d\d in an episode, 0% of them failed", shown.out)


@pytest.mark.slow
def test_models_are_evaluated_on_episodes(place, capsys):
    code = main(words(place, "evaluate", "evaluated", f"--environment.tools=[{place}/acts.py:times]",
                      f"--reward.functions=[{place}/acts.py:right]",
                      f"--evaluate.models=[a={place}/model, b={place}/model]"))
    shown = capsys.readouterr()
    assert code == 0, shown.err[-2000:]
    assert "times(a=12, b=3)" in (place / "evaluated/evaluate.md").read_text()


@pytest.mark.parametrize(("more", "told"), [
    (["--environment.max_turns=3"], "environment.max_turns is set; there is no environment"),
    (["--environment.isolate=true"], "environment.isolate is set; there is no environment"),
    (["--environment.factory={place}/acts.py:Game", "--environment.isolate=true"],
     "environment.isolate: reward.functions: right asks for environments, and they are in processes of their own"),
    (["--environment.tools=[nowhere.py:times]", "--environment.isolate=true"], "nowhere.py does not exist"),
    (["--environment.tools=[nowhere.py:times]"], "environment.tools: nowhere.py does not exist"),
    (["--environment.tools=[builtin:calcu]"], "there is no builtin:calcu"),
    (["--environment.factory={place}/acts.py:Gam"], "has no Gam that can be called"),
    (["--environment.factory={place}/acts.py:right"], "environment"),
    (["--environment.tools=[{place}/acts.py:times]", "--data.raw=true"], "data.raw is true"),
    (["--environment.tools=[{place}/acts.py:times]", "--data.max_prompt_length=3900"],
     "and the tools take 623 tokens of each prompt"),
])
def test_what_cannot_be_is_told_in_one_line(place, more, told, capsys):
    functions = f"--reward.functions=[{place}/acts.py:right]"
    code = main(words(place, "grpo", "refused", functions, *[word.format(place=place) for word in more]))
    shown = capsys.readouterr()
    assert code == 2 and told in shown.err, shown.err[-2000:]


@pytest.mark.slow
def test_trls_arguments_work_from_python(place):
    class Counter:
        times = times

        def reset(self, **row):
            self.calls = 0

    def called(environments, completions, **_):
        return [float(e.calls) for e in environments]

    trainer = hybrid_rlhf.GRPOTrainer(
        f"{place}/model", f"{place}/rows.jsonl", called, environment_factory=Counter,
        output_dir=f"{place}/python", max_steps=1, per_device_train_batch_size=2, dtype="float32",
        max_prompt_length=600, max_completion_length=150, num_fixed_prompts=0)
    found = trainer.train()
    assert found["reward"] == found["tools/call_frequency"] > 0


def rows_of(place: Path, name: str, *rows: dict) -> str:
    asked = [{"role": "user", "content": "What is 12 * 3?"}]
    (place / name).write_text("".join(json.dumps({"prompt": asked, **row}) + "\n" for row in rows))
    return f"--data.sources=[{place}/{name}]"


@pytest.mark.slow
def test_tools_of_rows_that_the_environments_take_the_place_of_are_told(place, capsys):
    other = {"type": "function", "function": {"name": "search", "description": "Searches.", "parameters": {
        "type": "object", "properties": {}}}}
    code = main(words(place, "grpo", "two", f"--environment.tools=[{place}/acts.py:times]", "--train.max_steps=1",
                      f"--reward.functions=[{place}/acts.py:right]",
                      rows_of(place, "two.jsonl", *[{"tools": [other], "number": i} for i in range(6)])))
    shown = capsys.readouterr()
    assert code == 0, shown.err[-2000:]
    assert "warning: rows have tools of their own, which are not shown" in shown.err
    assert metrics_of(place / "two")["tools/call_frequency"] > 0  # the script knows the prompt with `times` alone


@pytest.mark.parametrize(("more", "told"), [
    (["--evaluate.prompt_templates={a: 'Score 1. {prompt}'}", "--environment.factory={place}/acts.py:Game"],
     "evaluate.prompt_templates write the prompts, and so does environment"),
    (["--environment.factory={one: {place}/acts.py:Game, two: {place}/acts.py:Game}"], "needs a column environment"),
])
def test_an_evaluation_on_episodes_is_checked_before_it_starts(place, more, told, capsys):
    code = main(words(place, "evaluate", "refused_too", f"--evaluate.models=[a={place}/model, b={place}/model]",
                      *[word.replace("{place}", str(place)) for word in more]))
    shown = capsys.readouterr()
    assert code == 2 and told in shown.err, shown.err[-2000:]


def test_a_held_out_row_that_names_no_environment_is_refused_before_training(place, capsys):
    kinds = ["one"] * 7 + ["other"]  # the last two are held out
    rows = rows_of(place, "named.jsonl", *[{"environment": kind, "prompt": f"Number {i}?"} for i, kind in
                                           enumerate(kinds)])
    given = ["--environment.factory={one: " + f"{place}/acts.py:Game" + "}", rows, "--data.eval_fraction=0.5"]
    code = main(words(place, "grpo", "named", *given, "--train.max_steps=1", "--train.num_fixed_prompts=0"))
    shown = capsys.readouterr()
    assert code == 2 and "the column environment of a row is 'other'" in shown.err, shown.err[-2000:]
    assert not (place / "named/run.json").exists()  # nothing was begun
