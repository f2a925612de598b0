"""The same command again: a run goes on from its newest complete checkpoint, exactly, or says why it does not."""

from __future__ import annotations

import json
import os
import random
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rlhf.core.errors import NotFinite, UserError
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.run import checkpoint, loop, runfile, tensor_file
from hybrid_rlhf.run.loop import Stopped
from tests.factories.counting import Killed, Loader, Trainer, killed, left, runner


@pytest.fixture
def go(tmp_path):
    return runner(tmp_path)


@pytest.mark.parametrize("dies_at", range(1, 10))
def test_a_run_that_dies_in_any_step_ends_as_one_that_did_not(go, tmp_path, dies_at, capsys):
    go("straight")
    with pytest.raises(Killed):
        go("broken", {dies_at: killed})
    random.random(), torch.rand(5)  # another process begins elsewhere
    go("broken")
    assert left(tmp_path / "broken") == left(tmp_path / "straight")
    step = (dies_at - 1) // 2 * 2
    said = capsys.readouterr().err
    assert (f"goes on after step {step}, from step-{step:08d}" if step else "started again from the beginning") in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [2, 3, 5, 9])
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(go, tmp_path, step, number):
    """At step 3 an evaluation was due, which who wants to leave does not wait for: it is made up for."""
    go("straight")
    with pytest.raises(Stopped, match=f"(?s)^stopped after step {step} of 9\n.*checkpoint: .*step-0000000{step}\n"
                                      "go on: the command$"):
        go("broken", {step: lambda: os.kill(os.getpid(), number)})
    assert runfile.read_run(tmp_path / "broken").status == "stopped"
    go("broken")
    assert left(tmp_path / "broken") == left(tmp_path / "straight")


def test_sigterm_while_a_checkpoint_is_saved_leaves_it_whole_and_stops(go, tmp_path, monkeypatch):
    before, write, calls = signal.getsignal(signal.SIGTERM), tensor_file.write, []

    def interrupted(path, tensors):
        calls.append(path)
        if len(calls) == 2:  # of step 4, after that of step 2
            os.kill(os.getpid(), signal.SIGTERM)
        return write(path, tensors)

    monkeypatch.setattr(tensor_file, "write", interrupted)
    with pytest.raises(Stopped, match="stopped after step 5"):
        go("run")
    kept = checkpoint.steps(tmp_path / "run" / "checkpoints")
    assert [checkpoint.number(p) for p in kept] == [2, 4, 5] and all(checkpoint.damage(p) is None for p in kept)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_torn_checkpoint_is_passed_over_with_a_word_and_replaced(go, tmp_path, capsys):
    go("straight")
    with pytest.raises(Killed):
        go("broken", {7: killed})
    torn = tmp_path / "broken" / "checkpoints" / "step-00000006" / "state.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    go("broken")
    said = capsys.readouterr().err
    assert "step-00000006 is damaged and is passed over: state.safetensors has" in said and "after step 4" in said
    assert left(tmp_path / "broken") == left(tmp_path / "straight")


def test_a_changed_setting_is_refused_by_name_and_a_harmless_one_is_not(go, tmp_path):
    with pytest.raises(Killed):
        go("run", {5: killed})
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=r"unfinished run with other settings \(seed, train\.learning_rate\)"):
        go("run", seed=1, learning_rate=1e-2)
    with pytest.raises(UserError, match=r"\(train\.max_steps\)"):
        go("run", max_steps=12)  # a cosine ends elsewhere
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    go("run", save_steps=4, logging_steps=3, eval_steps=0, max_seconds=1e6, save_total_limit=1)
    assert runfile.read_run(tmp_path / "run").is_finished


def test_a_finished_run_at_a_constant_rate_can_be_made_longer(go, tmp_path):
    flat = dict(lr_scheduler_type="constant", eval_steps=0)
    go("straight", steps=8, max_steps=8, **flat)
    go("longer", steps=4, max_steps=4, **flat)
    assert go("longer", steps=4, max_steps=4, **flat).is_finished
    go("longer", steps=8, max_steps=8, **flat)
    ours, theirs = left(tmp_path / "longer"), left(tmp_path / "straight")
    assert ours["total"] == theirs["total"] and ours["step"] == 8
    with pytest.raises(UserError, match=r"train\.max_steps"):
        go("cosine", steps=4, max_steps=4), go("cosine", steps=8, max_steps=8)


def test_a_run_that_time_ended_goes_on_when_it_is_given_more(go, tmp_path):
    go("straight", eval_steps=0)
    go("short", max_seconds=1e-9, eval_steps=0)
    assert len((tmp_path / "short" / "metrics.jsonl").read_text().splitlines()) == 2  # a step, and the final evaluation
    go("short", eval_steps=0)
    assert left(tmp_path / "short")["total"] == left(tmp_path / "straight")["total"]


def test_a_checkpoint_can_be_named_and_only_one_of_this_run(go, tmp_path):
    go("run")
    full, folder = left(tmp_path / "run"), tmp_path / "run" / "checkpoints"
    go("run", resume=str(folder / "step-00000006"))
    assert left(tmp_path / "run") == full
    go("other")
    for wrong, said in ((tmp_path / "other" / "checkpoints" / "step-00000006", "not a checkpoint of this run"),
                        (folder / "step-00000008" / ".." / ".." / ".." / "other" / "checkpoints" / "step-00000006",
                         "not a checkpoint of this run"), (folder / "step-00000099", "choose auto, never or the path")):
        with pytest.raises(UserError, match=said):
            go("run", resume=str(wrong))
    (folder / "step-00000006" / "state.json").write_text("")
    with pytest.raises(UserError, match="is damaged"):
        go("run", resume=str(folder / "step-00000006"))


def test_the_best_checkpoint_is_kept_and_can_be_gone_back_to(go, tmp_path):
    go("run", save_best="eval/loss", save_total_limit=1)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    best = min((r for r in rows if "eval/loss" in r), key=lambda r: r["eval/loss"])["step"]
    kept = checkpoint.steps(tmp_path / "run" / "checkpoints" / "best")
    assert [checkpoint.number(p) for p in kept] == [best] and checkpoint.damage(kept[0]) is None
    assert [p.name for p in checkpoint.steps(tmp_path / "run" / "checkpoints")] == ["step-00000009"]
    go("run", save_best="eval/loss", save_total_limit=1, resume=str(kept[0]))
    with pytest.raises(UserError, match=r"save_best is 'eval/los', and the evaluation has eval/loss"):
        go("typo", save_best="eval/los")


def hour_glass(monkeypatch, minutes_per_save: float = 0.0):
    """A clock for the saver that stands still but for what is asked of it."""
    now = [0.0]
    keep = checkpoint.save

    def save(*given, **named):
        now[0] += 60 * minutes_per_save
        return keep(*given, **named)

    def pass_minutes(count: float) -> None:
        now[0] += 60 * count

    monkeypatch.setattr("hybrid_rlhf.run.checkpointing.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(checkpoint, "save", save)
    return pass_minutes


@pytest.mark.parametrize(("minutes", "minutes_per_save", "expected"), [
    (15.0, 0.0, [3, 6, 9]), (15.0, 1.0, [3, 7, 9]), (5.0, 0.0, [1, 2, 3, 4, 5, 6, 7, 8, 9]), (0.0, 0.0, [9])])
def test_the_clock_asks_for_checkpoints_and_they_take_no_more_than_a_twentieth_of_the_time(
        minutes, minutes_per_save, expected, go, tmp_path, monkeypatch):
    pass_minutes = hour_glass(monkeypatch, minutes_per_save)
    go("run", {step: lambda: pass_minutes(6) for step in range(1, 10)}, save_steps=0, save_minutes=minutes,
       save_total_limit=9)
    assert [checkpoint.number(p) for p in checkpoint.steps(tmp_path / "run" / "checkpoints")] == expected


def test_checkpoints_by_the_clock_change_no_bit_and_a_kill_costs_what_came_after_the_last(go, tmp_path, monkeypatch):
    go("straight", save_steps=0, save_minutes=0.0)
    pass_minutes = hour_glass(monkeypatch)
    with pytest.raises(Killed):
        go("run", {step: lambda: pass_minutes(1) for step in range(6)} | {6: killed}, save_steps=0, save_minutes=1.0)
    assert checkpoint.latest(tmp_path / "run" / "checkpoints").name == "step-00000005"
    go("run", save_steps=0, save_minutes=2.0)
    assert left(tmp_path / "run") == left(tmp_path / "straight")


def test_a_batch_that_could_not_be_digested_is_written_down(go, tmp_path):
    def fail() -> None:
        raise NotFinite("the actor's gradient was not finite in 20 updates in a row")

    with pytest.raises(NotFinite, match=r"in a row; the last batch is in .*not_finite"):
        go("run", {4: fail})
    assert json.loads((tmp_path / "run" / "not_finite" / "rest.json").read_text()) == {"dict": {"batch": {"value": 4}}}


def skipping(monkeypatch, steps) -> None:
    """From now on the trainer says that each of `steps` has skipped an update."""
    step = Trainer.step

    def skips(self, batch: int) -> Metrics:
        count = sum(number <= batch for number in steps)
        return step(self, batch).add_spread("train/skipped_updates", torch.tensor([float(count)]), "max")

    monkeypatch.setattr(Trainer, "step", skips)


def numbers_kept(folder) -> list[int]:
    return [checkpoint.number(path) for path in checkpoint.steps(folder / "checkpoints")]


def test_while_updates_are_skipped_nothing_from_before_is_removed(go, tmp_path, monkeypatch, capfd):
    """The update of step 3 has ruined the weights; every later one is skipped."""
    skipping(monkeypatch, range(4, 99))
    often = dict(save_steps=1, save_total_limit=2)

    def fail() -> None:
        raise NotFinite("the actor's gradient was not finite in 5 updates in a row")

    with pytest.raises(Killed):
        go("run", {7: killed}, **often)
    assert numbers_kept(tmp_path / "run") == [2, 3, 6]
    with pytest.raises(NotFinite, match=r"not_finite; the last checkpoint from before is .*step-00000003\nreport: "):
        go("run", {9: fail}, **often)  # it goes on after step 6, and knows
    assert numbers_kept(tmp_path / "run") == [2, 3, 8]
    said = [line for line in capfd.readouterr().err.splitlines() if "being skipped" in line]
    assert len(said) == 1 and "updates are being skipped; " in said[0] and "step-00000003 is from before" in said[0]


@pytest.mark.parametrize("holder", ["trainer", "sampler"])
def test_the_rollout_that_led_to_it_is_written_down_too(tmp_path, holder):
    rollout = Rollout.from_responses(Prompts([[5, 6]], ["why?"]), [[7, 8, 3]], [True], 0, ["so"])
    trainer = SimpleNamespace(last_rollout=rollout)
    trainer = SimpleNamespace(sampler=trainer) if holder == "sampler" else trainer
    saver = SimpleNamespace(trainer=trainer, record=SimpleNamespace(output_dir=str(tmp_path)))
    assert "the last batch is in" in str(loop._with_batch(NotFinite("not finite"), saver, {"value": 4}))
    assert "why?" in (tmp_path / "not_finite" / "rest.json").read_text()
    assert [[7, 8, 3]] in [t.tolist() for t in load_file(tmp_path / "not_finite" / "tensors.safetensors").values()]


def test_a_reward_source_that_fails_leaves_a_checkpoint_of_the_step_before(go, tmp_path, capfd):
    """Nothing was learnt in that step, and what it drew is drawn again."""
    def fail() -> None:
        error = UserError("reward source pay: answered 'oh'")
        error.is_before_update = True
        raise error

    go("straight", save_steps=0)
    with pytest.raises(UserError, match="answered 'oh'"):
        go("run", {6: fail}, save_steps=0)
    assert "a checkpoint after step 5 is saved" in capfd.readouterr().err
    assert runfile.read_run(tmp_path / "run").status == "failed"
    with pytest.raises(UserError, match="answered 'oh'"):
        go("run", {6: fail}, save_steps=0)
    go("run", save_steps=0)
    assert left(tmp_path / "run") == left(tmp_path / "straight")


def test_the_loader_says_whether_the_rows_are_those_of_a_checkpoint(go, monkeypatch):
    monkeypatch.setattr(Loader, "fingerprint", lambda _self: "of the first 64", raising=False)
    with pytest.raises(Killed):
        go("run", {5: killed})
    monkeypatch.setattr(Loader, "fingerprint", lambda _self: "of all", raising=False)
    with pytest.raises(UserError, match="the rows of the data are not those"):
        go("run")
    monkeypatch.setattr(Loader, "fingerprint", lambda _self: "of the first 64", raising=False)
    go("run")


def held_out_rows(fingerprint: str) -> Loader:
    loader = Loader()
    loader.fingerprint = lambda: fingerprint
    return loader


def test_other_held_out_rows_are_refused(go):
    with pytest.raises(Killed):
        go("run", {5: killed}, held_out=held_out_rows("these"))
    for others in (held_out_rows("those"), None):
        with pytest.raises(UserError, match="the held-out rows are not those"):
            go("run", held_out=others)
    go("run", held_out=held_out_rows("these"))


def test_a_second_process_is_told_that_the_first_is_still_at_it(go, tmp_path):
    import fcntl

    with pytest.raises(Killed):
        go("run", {5: killed})
    runfile.release(tmp_path / "run")  # a process that is killed lets go of it
    with open(tmp_path / "run" / "config.yaml") as file:  # as another process would
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for resume in ("auto", "never"):
            with pytest.raises(UserError, match=r"run: another process is at this run; wait for its end"):
                go("run", resume=resume)
    go("run")
