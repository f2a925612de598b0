"""Curves, alarms and samples of files that grow, shrink or are replaced; each value is worked out from the rows."""

from __future__ import annotations

import base64
import json
import os
import random
import statistics
from io import BytesIO

import pytest

from hybrid_rlhf.report import alarms
from hybrid_rlhf.rollout.episode_record import readable
from hybrid_rlhf.studio import run_history
from hybrid_rlhf.studio.run_history import Histories, Metrics, curves
from tests.factories.studio_runs import append, make_run, samples


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    return tmp_path


def write(folder, rows, mode="a"):
    with (folder / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def curve(found, name):
    series = found["series"][name]
    return list(zip(series["steps"], series["low"], series["high"], series["mean"], strict=True))


def ask(histories, folder, names, points=400):
    return curves(histories, folder, {"names": names, "points": str(points)})


def test_few_steps_are_told_as_they_are(folder):
    write(folder, [{"step": s, "reward": s / 7, "loss": -s} for s in range(1, 31)])
    write(folder, [{"step": 30, "eval/reward": 2.5, "eval/loss": 1}])
    found = ask(Histories(), folder, "reward,eval/reward,none,loss")
    assert found["step"] == 30 and found["notes"] == [] and sorted(found["series"]) == ["eval/reward", "loss", "reward"]
    assert curve(found, "reward") == [(s, s / 7, s / 7, s / 7) for s in range(1, 31)]
    assert curve(found, "loss")[4] == (5, -5.0, -5.0, -5.0)
    assert curve(found, "eval/reward") == [(30, 2.5, 2.5, 2.5)]


@pytest.mark.parametrize("num_rows", [7, 2048, 2049, 5000])
@pytest.mark.parametrize("points", [2, 333])
def test_buckets_have_the_lowest_the_highest_and_the_mean(folder, num_rows, points):
    draw = random.Random(3)
    values = {s: draw.gauss(0, 1) for s in range(1, num_rows + 1)}
    write(folder, [{"step": s, "reward": v} for s, v in values.items()])
    found = curve(ask(Histories(), folder, "reward", points), "reward")
    assert len(found) <= points and (num_rows > points or len(found) == num_rows)
    assert found[-1][0] == num_rows
    start = 0
    for step, low, high, mean in found:
        inside = [values[s] for s in range(start + 1, step + 1)]
        assert (low, high) == (min(inside), max(inside)) and mean == pytest.approx(statistics.fmean(inside), abs=1e-12)
        start = step


def test_metrics_that_come_late_or_seldom_have_no_gaps_of_nulls(folder):
    write(folder, [{"step": s, "loss": 1.0} | ({"late": 5.0} if s > 6 else {}) | ({"seldom": s} if s % 4 == 0 else {})
                   for s in range(1, 11)])
    found = ask(Histories(), folder, "late,seldom")
    assert [p[0] for p in curve(found, "late")] == [7, 8, 9, 10]
    assert curve(found, "seldom") == [(4, 4.0, 4.0, 4.0), (8, 8.0, 8.0, 8.0)]


def test_damaged_lines_are_skipped_and_counted_once(folder):
    (folder / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 1.0, "text": "x"}\n{"step": 2, "loss"\n[1]\n'
                                           b'{"step": 3, "loss": 3.0}\n{"step": 3, "loss": 9.0}\n')
    histories = Histories()
    for _ in range(2):
        found = ask(histories, folder, "loss,text")
        assert curve(found, "loss") == [(1, 1.0, 1.0, 1.0), (3, 3.0, 3.0, 3.0)] and set(found["series"]) == {"loss"}
        assert found["notes"] == ["metrics.jsonl: 3 damaged lines were skipped"]


def test_an_update_reads_only_what_is_new(folder, monkeypatch):
    lines = []
    write(folder, [{"step": s, "loss": s} for s in range(1, 1001)])
    metrics, take = Metrics(folder), Metrics._take
    monkeypatch.setattr(Metrics, "_take", lambda self, place, line: (lines.append(line), take(self, place, line)))
    metrics.update()
    metrics.update()
    assert len(lines) == 1000
    write(folder, [{"step": 1001, "loss": 7.0}])
    metrics.update()
    assert len(lines) == 1001 and metrics.step == 1001 and metrics.curve("loss", 5)[-1].step == 1001


def test_what_is_not_finite_is_null_and_an_alarm(folder):
    with (folder / "metrics.jsonl").open("w") as file:
        file.write('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": null}\n{"step": 3, "loss": NaN}\n'
                   '{"step": 4, "loss": -Infinity}\n{"step": 5, "loss": 1e999}\n{"step": 6, "loss": 2.0}\n')
    histories = Histories()
    assert [p[3] for p in curve(ask(histories, folder, "loss"), "loss")] == [1.0, None, None, None, None, 2.0]
    assert curve(ask(histories, folder, "loss", 2), "loss") == [(3, 1.0, 1.0, 1.0), (6, 2.0, 2.0, 2.0)]
    found = histories.metrics(folder, lambda metrics: metrics.alarms([]))
    assert [a.name for a in found] == ["not a number"] and "loss" in found[0].text and "step 2" in found[0].text


def test_one_value_that_is_not_finite_is_an_alarm_in_a_long_run_too(folder):
    write(folder, [{"step": s, "reward": 1.0, "reward_std": 1.0, "loss": None if s == 3001 else 1.0}
                   for s in range(1, 6001)])
    found = Histories().metrics(folder, lambda metrics: metrics.alarms([]))
    assert "loss was not a finite number at step 3001." in found[0].text


def test_a_line_is_taken_when_it_is_whole(folder):
    histories, path = Histories(), folder / "metrics.jsonl"
    text = '{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n'
    for end in range(len(text) + 1):
        path.write_text(text[:end]) if end == 0 else path.open("a").write(text[end - 1])
        series = ask(histories, folder, "loss")
        assert len(series["series"].get("loss", {"steps": []})["steps"]) == text[:end].count("\n")
        assert series["notes"] == []


def test_a_run_that_goes_on_from_a_checkpoint_is_read_anew(folder):
    histories, path = Histories(), folder / "metrics.jsonl"
    write(folder, [{"step": s, "loss": float(s)} for s in range(1, 21)])
    assert ask(histories, folder, "loss")["step"] == 20
    lines = path.read_text().splitlines(keepends=True)
    path.open("r+").truncate(sum(map(len, lines[:10])))
    assert ask(histories, folder, "loss")["step"] == 10
    path.open("r+").truncate(sum(map(len, lines[:5])))
    write(folder, [{"step": s, "loss": -float(s)} for s in range(6, 40)])  # longer than it was
    found = curve(ask(histories, folder, "loss"), "loss")
    assert [p[3] for p in found] == [float(s) if s <= 5 else -float(s) for s in range(1, 40)]


@pytest.mark.parametrize("how", ["replaced", "written anew", "gone", "empty"])
def test_a_file_of_another_run_is_read_anew(folder, how):
    histories, path = Histories(), folder / "metrics.jsonl"
    write(folder, [{"step": s, "loss": 1.0} for s in range(1, 21)])
    assert ask(histories, folder, "loss")["step"] == 20
    rows = [{"step": s, "other": 2.5} for s in range(1, 31)]
    if how == "replaced":
        (folder / "new").write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(folder / "new", path)
    elif how == "written anew":
        write(folder, rows, "w")
    else:
        path.unlink() if how == "gone" else path.write_text("")
        found = ask(histories, folder, "loss,other")
        assert found == {"step": None, "notes": [], "series": {}}
        write(folder, rows)
    found = ask(histories, folder, "loss,other")
    assert found["step"] == 30 and set(found["series"]) == {"other"} and len(curve(found, "other")) == 30


def test_alarms_are_those_of_the_rows_themselves(folder):
    draw = random.Random(5)
    rows = [{"step": s, "reward": s / 500 + draw.gauss(0, 0.1), "reward_std": 1.0, "objective/kl": s / 50,
             "rewards/length/mean": -s / 300 + draw.gauss(0, 0.1), "rewards/length/std": 1.0,
             "completions/mean_length": 40 - s / 30, "completions/clipped_ratio": 0.0} for s in range(1, 1001)]
    held_out = [{"step": s, "eval/reward": 3 - s / 400, "eval/reward_std": 0.5} for s in range(100, 1001, 100)]
    write(folder, [row for s in range(1, 1001) for row in (*rows[s - 1:s], *(h for h in held_out if h["step"] == s))])
    names = {a.name for a in alarms.find(rows)}
    assert {"reward hacking", "KL", "length collapse"} <= names
    found = Histories().metrics(folder, lambda metrics: metrics.alarms([]))
    ordered = sorted(rows + held_out, key=lambda row: row["step"])
    assert sorted(found, key=str) == sorted(alarms.find(ordered), key=str) and "overfitting" in {a.name for a in found}


def test_alarms_of_a_long_run_are_found_in_means(folder):
    draw = random.Random(5)
    write(folder, [{"step": s, "reward": 1 + draw.gauss(0, 0.1), "reward_std": 1.0,
                    "completions/mean_length": 40 - s / 400 + draw.gauss(0, 2)} for s in range(1, 10_001)])
    found = Histories().metrics(folder, lambda metrics: metrics.alarms([]))
    assert [a.name for a in found] == ["length collapse"] and "to 16." in found[0].text  # 40 - 9500 / 400 = 16.25


def test_endless_answers_are_an_alarm(folder):
    (folder / "answers.jsonl").write_text("".join(json.dumps({"step": s, "prompt": "a", "ended": s == 0}) + "\n"
                                                  for s in (0, 0, 9, 9)))
    assert [a.name for a in Histories().alarms(folder)] == ["endless answers"]


def test_answers_before_the_first_step_are_no_alarm(folder):
    (folder / "answers.jsonl").write_text('{"step": 0, "prompt": "a", "ended": false}\n' * 4)
    assert Histories().alarms(folder) == []


def test_sums_and_peaks_are_those_of_all_steps(folder):
    write(folder, [{"step": s, "time/train": 0.25, "memory/actor/update": s % 3500} for s in range(1, 10_001)])
    total, peak = Histories().metrics(folder, lambda h: (h.total("time/train"), h.highest("memory/actor/update")))
    assert total == 2500.0 and peak == 3499


def ask_samples(folder, reader=None, **query):
    return run_history.samples(reader or Histories(), folder, {name: str(value) for name, value in query.items()})


def test_the_newest_step_is_told_and_any_other_on_request(tmp_path):
    run = make_run(tmp_path, "a", "ppo", 11, "running")
    found = ask_samples(run.folder)
    assert found["steps"] == [1, 5, 10]
    assert found["samples"] == samples(10) and len(found["samples"]) == 4
    assert ask_samples(run.folder, step=5, limit=2)["samples"] == samples(5)[:2]
    assert ask_samples(run.folder, step=6)["samples"] == []
    assert [(row["step"], row["completion"]) for row in found["answers"]] == [(0, "After 0 steps: B")] * 4


def test_a_run_without_samples_says_what_it_has(tmp_path):
    sft = make_run(tmp_path, "sft", "sft", 4)
    found = ask_samples(sft.folder)
    assert found["steps"] == found["samples"] == [] and {row["step"] for row in found["answers"]} == {0, 4}
    for name in ("samples.jsonl", "answers.jsonl"):
        (sft.folder / name).unlink()
    assert ask_samples(sft.folder) == {"steps": [], "samples": [], "answers": []}


def test_samples_that_are_written_or_cut_back_are_followed(tmp_path):
    run, reader = make_run(tmp_path, "a", "ppo", 5, "running"), Histories()
    path = run.folder / "samples.jsonl"
    size = path.stat().st_size
    assert ask_samples(run.folder, reader)["steps"] == [1, 5]
    append(path, samples(10))
    assert ask_samples(run.folder, reader)["steps"] == [1, 5, 10]
    with path.open("a") as file:
        file.write('{"step": 15, "prompt": "half')
    found = ask_samples(run.folder, reader)
    assert found["steps"] == [1, 5, 10] and found["samples"] == samples(10)
    path.open("r+").truncate(size)
    assert ask_samples(run.folder, reader)["steps"] == [1, 5]
    append(path, samples(7))
    found = ask_samples(run.folder, reader)
    assert found["steps"] == [1, 5, 7] and found["samples"] == samples(7)


def test_an_episode_is_told_turn_by_turn_and_without_its_tokens(tmp_path):
    run = make_run(tmp_path, "a", "grpo", 1, "running", has_tools=True)
    row = ask_samples(run.folder)["samples"][0]
    assert "replay" not in row and row["ended_by"] == "done"
    assert row["turns"] == [{"who": "assistant", "text": "Let me look. add(a=1, b=2)"}, {"who": "add", "text": "3"},
                            {"who": "assistant", "text": "It is 3."}]


def test_turns_are_read_as_the_rollout_writes_them():
    text = readable([{"role": "assistant", "content": "two\nlines [x] here", "tool_calls": [
        {"function": {"name": "look", "arguments": {"at": "it"}}}]},
        {"role": "tool", "name": "look", "content": "seen"}, {"role": "user", "content": "and?"},
        {"role": "assistant", "content": ""}])
    assert run_history.turns(text) == [{"who": "assistant", "text": "two\nlines [x] here look(at='it')"},
                                         {"who": "look", "text": "seen"}, {"who": "user", "text": "and?"},
                                         {"who": "assistant", "text": ""}]
    assert run_history.turns("no turns") == [] and run_history.turns("") == []
    assert run_history.turns("before\n[a] x") == [{"who": "", "text": "before"}, {"who": "a", "text": "x"}]


def test_what_is_sent_is_bounded(tmp_path):
    run = make_run(tmp_path, "a", "ppo", 0, "running")
    for _ in range(100):
        append(run.folder / "samples.jsonl", samples(1))
        append(run.folder / "answers.jsonl", [{"step": 1, "prompt": "p" * 1000, "completion": "c"}] * 20)
    found = ask_samples(run.folder)
    assert len(found["samples"]) == 20 and len(found["answers"]) == run_history.MAX_ANSWERS


def test_samples_have_small_pictures_of_their_images_and_never_the_files_themselves(tmp_path):
    from PIL import Image

    Image.new("RGB", (400, 100), (0, 200, 0)).save(tmp_path / "green.png")
    (tmp_path / "secret.txt").write_text("a secret")
    paths = [str(tmp_path / name) for name in ("green.png", "secret.txt", "gone.png")]
    append(tmp_path / "samples.jsonl", [{"step": 1, "prompt": "p", "images": paths, "completion": "c"}])
    append(tmp_path / "answers.jsonl", [{"step": 0, "prompt": "p", "images": [paths[0]] * 10, "completion": "c"}])
    found = ask_samples(tmp_path)
    (green, secret, gone), many = found["samples"][0]["images"], found["answers"][0]["images"]
    assert secret == {"name": "secret.txt (cannot be read)", "url": None}
    assert gone == {"name": "gone.png (cannot be read)", "url": None}
    image = Image.open(BytesIO(base64.b64decode(green["url"].removeprefix("data:image/jpeg;base64,"))))
    assert (green["name"], image.size, image.getpixel((60, 16))) == ("green.png", (128, 32), pytest.approx(
        (0, 200, 0), abs=6))
    assert many == [green] * 8 + [{"name": "and 2 more", "url": None}]
