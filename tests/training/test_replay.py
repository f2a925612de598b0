"""`hybrid-rlhf replay`: a run's steps again to the bit, its rollouts by another reward, and forks of it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from hybrid_rlhf.cli import main
from hybrid_rlhf.core.image_files import ImageRef
from hybrid_rlhf.data.turns import IMAGE
from hybrid_rlhf.report.rescored import began
from hybrid_rlhf.report.summary import summarize
from hybrid_rlhf.rewards.functions import FunctionSource
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.rollout.episode_record import Episode
from hybrid_rlhf.run.reporter import Asked, watched_by
from hybrid_rlhf.run.runfile import RunRecord
from hybrid_rlhf.training import past_run
from tests.factories.stage_options import COMMON, WORDS, short_sft, used
from tests.factories.tiny import own_cache

CODE = """def long(completions, **_):
    return [float(len(c)) for c in completions]


def vowels(completions, word, **_):
    return [float(sum(c.count(v) for v in "aeiou")) - len(w) for c, w in zip(completions, word)]


def short(completions, **_):
    return [None if len(c) > 9 else -float(len(c)) for c in completions]
"""
STEPS = ["--ppo.sampling.max_new_tokens", "6", "--roles.actor.learning_rate", "1e-2", "--train.max_steps", "6",
         "--train.per_device_train_batch_size", "3", "--train.save_steps", "2", "--train.eval_steps", "3"]
BASE, CRITIC, LORA = ["--model", "base"], ["--roles.critic.learning_rate", "1e-2"], ["--model.lora.r", "4"]
RUNS = {"grpo": ("grpo", ["--resume", "never"]),  # it starts from the run sft beside it
        "grpo_lora": ("grpo", BASE + LORA), "ppo": ("ppo", BASE + CRITIC), "ppo_lora": ("ppo", BASE + CRITIC + LORA)}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    rows = [{"prompt": f"say {w} {i}", "word": w} for i in range(2) for w in WORDS]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        patch.chdir(folder)
        assert main([*short_sft(folder), "--output_dir", "runs/sft"]) == 0
        yield folder


def launch(place: Path, name: str, *more: str) -> Path:
    """The run of RUNS, made once, with the tokens that it sampled in NAME.json beside it. The one called ppo is stopped
    after step 3, where an evaluation is due, and goes on."""
    stage, options = RUNS[name.split("-")[0]]
    out, seen = place / "runs" / name, {}

    def watch(event: str, facts: dict) -> Asked:
        if event == "begin":
            seen["trainer"] = facts["trainer"]
        elif event == "step_end":
            rollout = seen["trainer"].last_rollout
            seen[facts["step"]] = [ids[mask].tolist() for ids, mask in
                                   zip(rollout.response_ids, rollout.response_mask, strict=True)]
            if facts["step"] == 3 and ends[0] == 130:
                os.kill(os.getpid(), signal.SIGINT)
        return Asked()

    if out.exists():
        return out
    ends = [130, 0] if name == "ppo" else [0]
    while ends:
        with watched_by(watch):
            assert main(["--stage", stage, "--output_dir", str(out), *used(stage, COMMON),
                         f"--data.sources=[{{path: {place}/asked.jsonl}}]",
                         f"--reward.functions=['{place}/rewards.py:long']", *STEPS, *options, *more]) == ends[0]
        ends.pop(0)
    seen.pop("trainer")
    (place / f"{name}.json").write_text(json.dumps(seen))
    return out


def digests(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(folder.rglob("*")) if p.is_file()}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", RUNS)
def test_the_steps_of_a_run_are_the_same_again_to_the_bit_and_it_stays_as_it_is(place, tmp_path, name, capsys) -> None:
    run = launch(place, name)
    before = digests(run)
    assert main(["replay", str(run), "--output_dir", str(tmp_path / "again")]) == 0
    assert "steps 1 to 6 are the same again, to the bit" in capsys.readouterr().out
    assert digests(run) == before
    sampled = json.loads((place / f"{name}.json").read_text())
    assert {str(step): [row["response_ids"] for row in rows] for step, rows in past_run.read_rollouts(
        tmp_path / "again" / "rollouts.jsonl")} == sampled
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again"]  # nothing is left of the run that was taken again


def test_a_replay_from_a_checkpoint_takes_the_steps_after_it_alone(place, tmp_path, capsys) -> None:
    run = launch(place, "ppo")
    assert main(["replay", str(run), "--from", "5", "--output_dir", str(tmp_path / "again")]) == 0
    assert "steps 5 to 6 are the same again" in capsys.readouterr().out  # checkpoints of steps 4 and 6 are kept
    assert main(["replay", str(run), "--to", "2", "--output_dir", str(tmp_path / "short")]) == 0
    assert "steps 1 to 2 are the same again" in capsys.readouterr().out


def test_the_first_value_that_is_another_one_is_named_and_so_is_changed_code(place, tmp_path, capsys) -> None:
    """In a copy whose record was changed in the last bit of one metric."""
    run = tmp_path / "run"
    shutil.copytree(launch(place, "grpo"), run)
    rows = lines(run / "metrics.jsonl")
    row = next(row for row in rows if row["step"] == 4 and "kl" in row)
    old, row["kl"] = row["kl"], row["kl"] * (1 + 2**-52)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = json.loads((run / "run.json").read_text())
    record["versions"]["torch"], record["code"] = "1.0", {f"{place}/rewards.py": "another"}
    (run / "run.json").write_text(json.dumps(record))
    assert main(["replay", str(run), "--output_dir", str(tmp_path / "again")]) == 1
    said = capsys.readouterr()
    assert f"step 4 is the first that is not the same again: kl was {row['kl']}, and is {old}; steps 1 to 3 are" in (
        said.out)
    assert "the run had 1.0" in said.err and "rewards.py has changed since the run" in said.err


def test_rollouts_by_another_reward_are_what_a_count_of_their_texts_gives(place, tmp_path, capsys) -> None:
    run, out = launch(place, "grpo"), tmp_path / "again"
    assert main(["replay", str(run), "--reward", f"{place}/rewards.py:vowels", "--output_dir", str(out)]) == 0
    told = capsys.readouterr()
    assert "own reward" in told.out and "Hacking began where the other reward" in told.out
    word_of = {row["prompt"]: row["word"] for row in lines(place / "asked.jsonl")}
    by_step: dict[int, list[dict]] = {}
    for row in lines(out / "rollouts.jsonl"):
        by_step.setdefault(row["step"], []).append(row)
    own = {row["step"]: row["reward"] for row in lines(run / "metrics.jsonl") if "reward" in row}
    assert "- taken again: steps 1 to 6 are the same again" in (out / "replay.md").read_text()
    for point in json.loads((out / "replay.json").read_text())["curves"]:
        rows = by_step[point["step"]]
        scores = [len([c for c in r["completion"] if c in "aeiou"]) - len(
            next(w for p, w in word_of.items() if p in r["prompt"])) for r in rows]
        assert point["other"] == pytest.approx(fmean(scores), abs=1e-6) and point["responses"] == len(rows) == 24
        assert point["reward"] == pytest.approx(own[point["step"]], abs=1e-6)
    made = (out / "rollouts.jsonl").stat().st_mtime_ns
    assert main(["replay", str(run), "--reward", f"{place}/rewards.py:short", "--output_dir", str(out)]) == 0
    assert (out / "rollouts.jsonl").stat().st_mtime_ns == made  # a second reward trains nothing
    assert "the rollouts are those in" in capsys.readouterr().err
    lengths = [len(r["completion"]) for r in by_step[1] if len(r["completion"]) <= 9]  # the others are skipped
    first = json.loads((out / "replay.json").read_text())["curves"][0]
    assert first["other"] == pytest.approx(-fmean(lengths), abs=1e-6)


def test_recorded_samples_are_scored_without_a_model(place, tmp_path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("run.json", "samples.jsonl"):
        shutil.copyfile(launch(place, "grpo") / name, run / name)
    assert main(["replay", str(run), "--recorded", "--reward", f"{place}/rewards.py:long"]) == 0
    curves = json.loads((tmp_path / "run_replay" / "replay.json").read_text())["curves"]
    rows = [row for row in lines(run / "samples.jsonl") if row["step"] == 3]
    assert next(c for c in curves if c["step"] == 3)["other"] == pytest.approx(fmean(
        len(row["completion"]) for row in rows))


@pytest.mark.parametrize(("name", "step"), [("grpo", 3), ("ppo_lora", 4)])
def test_a_fork_is_a_run_whose_setting_is_changed_at_that_step(place, tmp_path, name, step, capsys) -> None:
    """Against a run in which the coefficient is changed by hand while it goes on, without any checkpoint. Of step 3
    there is none, of step 4 there is one."""
    run, out = launch(place, name), tmp_path / "fork"
    before = digests(run)
    assert main(["replay", str(run), "--fork", str(step), "--ppo.kl_coef", "0.7", "--output_dir", str(out)]) == 0
    told = capsys.readouterr()
    said = told.out
    assert digests(run) == before and told.err.count("settings: ") == 1  # those of the steps taken again are the run's

    def change(event: str, facts: dict) -> Asked:
        if event == "begin":
            change.trainer = facts["trainer"]
        elif event == "step_end" and facts["step"] == step:
            change.trainer.kl_coef.value = 0.7
        return Asked()

    with watched_by(change):
        by_hand = launch(place, f"{name}-by-hand-{step}")
    rows, others = ([{k: v for k, v in row.items() if not k.startswith(("time/", "memory/", "engine/tokens"))}
                     for row in lines(folder / "metrics.jsonl")] for folder in (out, by_hand))
    assert rows == others and rows[-2]["kl_coef"] == 0.7
    assert rows != [{k: v for k, v in row.items() if k in rows[0]} for row in lines(run / "metrics.jsonl")]
    theirs, mine = (json.loads((place / f"{n}.json").read_text()) for n in (name, f"{name}-by-hand-{step}"))
    pairs = ((s, i, *pair) for s in map(str, range(1, 7)) for i, pair in enumerate(
        zip(mine[s], theirs[s], strict=True)))
    first = next((f"step {s}, response {i + 1}, token {p + 1}: " for s, i, a, b in pairs
                  for p in range(max(len(a), len(b))) if a[p : p + 1] != b[p : p + 1]), None)
    differs = f"he first token that differs: {first}" if first else "o token of"
    assert differs in said and (first or name != "grpo")
    page = "\n".join(summarize(out, name).fork_lines)
    assert f"after step {step}, with ppo.kl_coef 0.7 (was 0.04)" in page and differs in page
    assert main(["replay", str(out), "--against", str(out)]) == 0
    assert f"differs from {out} in the {6 - step} steps" in capsys.readouterr().out
    assert main(["replay", str(out), "--output_dir", str(tmp_path / "again")]) == 0
    assert "steps 5 to 6 are the same again" in capsys.readouterr().out  # of its checkpoints 4 and 6 are left


def test_rows_of_a_file_are_the_rollout_that_a_function_is_given() -> None:
    """One of text, with a column, and one of episodes, which come back as their messages."""
    def last_word(completions, answer, completion_ids, **_):
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        return [None if a is None else len(t) + len(ids) / 10 for t, a, ids in zip(texts, answer, completion_ids,
                                                                                   strict=True)]

    turns = [[{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"},
              {"role": "assistant", "content": "ccc"}], [{"role": "assistant", "content": "dd"}]]
    for episodes in ([], [Episode(messages=each) for each in turns]):
        rollout = Rollout.from_responses(Prompts([[1], [2]], ["p", "q"], {"answer": ["x", None]}), [[5, 6], [7]],
                                         [True, False], 0, ["ccc", "dd"])
        rollout.scores, rollout.episodes = torch.tensor([1.5, float("nan")]), episodes
        rows = json.loads(json.dumps(past_run.rows_of(3, rollout)))
        assert [row["completion"] for row in rows] == (turns if episodes else ["ccc", "dd"])
        (point,) = past_run.rescored([(3, rows)], FunctionSource("f", last_word))
        assert point == {"step": 3, "reward": 1.5, "reward_std": 0.0, "other": pytest.approx(3.2), "other_std": 0.0,
                         "responses": 2}


def rollout(step: int, *responses: list[int], prompt: tuple = (1, 2)) -> list[dict]:
    return [{"step": step, "prompt_ids": list(prompt), "response_ids": ids} for ids in responses]


def test_the_first_token_that_differs_is_found_where_it_is() -> None:
    a = rollout(2, [5, 6, 7], [8, 9, 3])
    assert past_run.first_token(2, a, rollout(2, [5, 6, 7], [8, 9, 3])) is None
    assert past_run.first_token(2, a, rollout(2, [5, 6, 7], [8, 1, 3])) == (2, 1, 1, 9, 1)
    assert past_run.first_token(2, a, rollout(2, [5, 6], [8, 1, 3])) == (2, 0, 2, 7, None)  # that one has ended
    assert past_run.first_token(2, a, rollout(2, [5, 6, 7])) == (2, 1, None, None, None)
    assert past_run.first_token(2, a, rollout(2, [0], [0], prompt=(1, 3))) == (2, 0, None, None, None)


def test_a_fork_is_compared_in_the_steps_that_have_rollouts_alone(tmp_path, monkeypatch) -> None:
    """Steps 4 of both are on demonstrations; the fork's rollouts end with step 6. Its first token differs in step 5."""
    ours = {step: [] if step == 4 else rollout(step, [step, 1]) for step in range(1, 8)}
    taken: list[int] = []

    def again(_past, _run, _folder, _start, watch) -> None:
        for step, rows in ours.items():
            taken.append(step)
            if watch.take(step, rows):
                return

    def compared(**theirs: list[int]):
        rows = {3: [3, 1], 5: [5, 1], 6: [6, 1]} | {int(name[1:]): ids for name, ids in theirs.items()}
        (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for step, ids in rows.items()
                                                         for row in rollout(step, ids) if ids))
        taken.clear()
        return past_run.first_difference(past, None, tmp_path / "rollouts.jsonl", tmp_path)[:2]

    monkeypatch.setattr(past_run, "again", again)
    past = SimpleNamespace(last=7, start=lambda _step: None)
    (tmp_path / "fork.json").write_text(json.dumps({"of": str(tmp_path), "step": 2}))
    assert compared(s5=[5, 2]) == ((5, 0, 1, 2, 1), 2) and taken == [1, 2, 3, 4, 5]
    assert compared() == (None, 3)
    assert compared(s3=[], s5=[], s6=[]) == (None, 0) and taken == [1]
    assert (past_run.forked_at(tmp_path, tmp_path), past_run.forked_at(tmp_path, tmp_path / "other")) == (2, 0)


def test_a_function_gets_the_images_of_rows_of_a_file_as_in_the_run(tmp_path) -> None:
    Image.new("RGB", (4, 3), "red").save(tmp_path / "red.png")
    red, seen = ImageRef(str(tmp_path / "red.png"), 4, 3), []
    asked = [{"role": "user", "content": f"{IMAGE}Which?", "images": [red]}]
    made = Rollout.from_responses(Prompts([[1], [2]], ["p", "q"], {"prompt": [asked, "q"], "images": [[red], []]},
                                          [(red,), ()]), [[5, 6], [7]], [True, True], 0, ["a", "b"])
    made.scores = torch.zeros(2)

    def colours(prompts, images, completions):
        part = next(part for part in prompts[0][0]["content"] if part["type"] == "image")
        seen.append([part["image"].getpixel((0, 0)), *(each.getpixel((0, 0)) for each in images[0]), images[1]])
        return [1.0] * len(completions)

    past_run.rescored([(1, json.loads(json.dumps(past_run.rows_of(1, made))))], FunctionSource("f", colours))
    assert seen == [[(255, 0, 0), (255, 0, 0), []]]


def test_two_forks_are_compared_in_the_steps_that_both_have(tmp_path, capsys) -> None:
    files = {"a": [rollout(3, [5]), rollout(4, [6, 7]), rollout(5, [1])],
             "b": [rollout(4, [6, 7]), rollout(5, [2]), rollout(6, [1])]}
    for name, steps in files.items():
        (tmp_path / name).mkdir()
        RunRecord(str(tmp_path / name), "grpo", "finished").write()
        (tmp_path / name / "rollouts.jsonl").write_text("".join(json.dumps(r) + "\n" for rows in steps for r in rows))
    assert main(["replay", f"{tmp_path}/a", "--against", f"{tmp_path}/b"]) == 0
    assert (f"step 5, response 1, token 1: token 1 in {tmp_path}/a, token 2 in {tmp_path}/b" in capsys.readouterr().out)
    (tmp_path / "b").rename(tmp_path / "b_replay")
    (tmp_path / "b_replay" / "rollouts.json").write_text(json.dumps({"compared": "step 4 is the first that is not"}))
    (tmp_path / "b").mkdir()
    assert main(["replay", f"{tmp_path}/a", "--against", f"{tmp_path}/b"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"of {tmp_path}/b: step 4 is the first that is not"


def test_hacking_begins_where_the_other_reward_is_at_its_best_and_the_own_one_goes_on() -> None:
    """Tents of 40 steps: the other reward rises to step 15 and falls. Means of 4 steps are the highest for 13 to 16 and
    14 to 17 alike, of which the first counts; its middle is step 15."""
    def history(own, other) -> list[dict]:
        return [{"step": s, "reward": own(s), "other": other(s), "other_std": 1.0} for s in range(1, 41)]

    def tent(s: int) -> float:
        return min(s, 30 - s) / 2.0

    assert began(history(float, tent)) == 15
    assert began(history(lambda _s: 1.0, tent)) is None  # the own reward does not rise
    assert began(history(float, float)) is None
    assert began(history(float, lambda s: s % 2)) is None  # noise
    assert began(history(float, tent)[:3]) is None


def test_a_replay_that_was_stopped_begins_again_and_another_folder_is_left_alone(place, tmp_path, capsys) -> None:
    run, out = launch(place, "grpo"), tmp_path / "again"

    def stop(event: str, facts: dict) -> Asked:
        if event == "step_end" and facts["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return Asked()

    words = ["replay", str(run), "--output_dir", str(out)]
    with watched_by(stop):
        assert main(words) == 130
    assert "stopped after step 2 of 6; the same command begins again" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again"]
    assert main([*words, "--to", "2"]) == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    for more in ([], ["--fork", "2", "--ppo.kl_coef", "1"]):
        assert main([*words[:3], str(tmp_path / "mine"), *more]) == 2
        assert "mine holds something else" in capsys.readouterr().err
    with (out / "rollouts.jsonl").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(words) == 2
    assert "another process is at this run" in capsys.readouterr().err


def test_a_fork_that_turns_on_what_the_run_has_no_state_of_leaves_nothing(place, tmp_path, capsys) -> None:
    out = tmp_path / "fork"
    words = ["replay", str(launch(place, "grpo")), "--fork", "3", "--output_dir", str(out)]
    assert main([*words, "--ppo.ema", "true"]) == 2
    assert "ppo.ema: the run has no state of what this turns on" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main([*words, "--ppo.kl_coef", "0.3"]) == 0


def test_what_cannot_be_taken_again_is_said_in_one_line(place, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(short_sft(tmp_path)) == 0
    code = tmp_path / "gone.py"
    code.write_text(CODE)
    run = launch(place, "grpo")
    gone = tmp_path / "gone"
    shutil.copytree(run, gone)
    record = json.loads((gone / "run.json").read_text())
    (gone / "run.json").write_text(json.dumps(record | {"code": {"no/such.py": "0"}}))
    shutil.copytree(run, tmp_path / "changed")
    (tmp_path / "changed" / "run.json").write_text(json.dumps(record | {"code": {f"{place}/rewards.py": "0"}}))
    many = tmp_path / "many"
    shutil.copytree(run, many)
    for path in (many / "checkpoints").iterdir():
        past_run.checkpoint.copy_changed(path, many / "checkpoints", {("run", "world_size"): 2})
    cases = {("run",): "samples no rollouts", ("nothing",): "nothing holds no run", (): "no run; give its folder",
             ("gone",): "no/such.py, which gone was rewarded or answered by, is gone",
             ("changed", "--fork", "3", "--ppo.kl_coef", "1"): "rewards.py has changed since the run, which has no",
             ("many",): "trained by 2 processes", (str(run), "--recorded"): "--recorded is for --reward",
             (str(run), "--ppo.kl_coef", "1"): "settings are changed with --fork",
             (str(run), "--fork", "2"): "no setting that changes",
             (str(run), "--fork", "2", "--model.lora.r", "2"): "a fork keeps model.lora.r",
             (str(run), "--fork", "9", "--ppo.kl_coef", "1"): "has steps 1 to 6",
             (str(run), "--reward", f"{code}:none"): "has no none", (str(run), "--output_dir", str(run)): "RUN itself",
             (str(run), "--output_dir", str(run / "again")): "or inside it",
             (str(run), "--to", "-1"): "the first step is 1",
             (str(run), "--against", str(run)): "has no rollouts.jsonl"}
    for words, message in cases.items():
        capsys.readouterr()
        assert main(["replay", *words]) == 2, words
        said = capsys.readouterr().err.splitlines()
        assert message in said[-1], (words, said)
