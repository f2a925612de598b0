"""Samples and answers by step, and episodes turn by turn."""

from __future__ import annotations

from hybrid_rlhf.rollout.episode_record import readable
from hybrid_rlhf.studio import run_history
from hybrid_rlhf.studio.run_history import Histories
from tests.factories.studio_runs import append, make_run, samples


def ask(folder, reader=None, **query):
    return run_history.samples(reader or Histories(), folder, {name: str(value) for name, value in query.items()})


def test_the_newest_step_is_told_and_any_other_on_request(tmp_path):
    run = make_run(tmp_path, "a", "ppo", 11, "running")
    found = ask(run.folder)
    assert found["steps"] == [1, 5, 10] and found["notes"] == []
    assert found["samples"] == samples(10) and len(found["samples"]) == 4
    assert ask(run.folder, step=5, limit=2)["samples"] == samples(5)[:2]
    assert ask(run.folder, step=6)["samples"] == []
    assert [(row["step"], row["completion"]) for row in found["answers"]] == [(0, "After 0 steps: B")] * 4


def test_a_run_without_samples_says_what_it_has(tmp_path):
    sft = make_run(tmp_path, "sft", "sft", 4)
    found = ask(sft.folder)
    assert found["steps"] == found["samples"] == [] and {row["step"] for row in found["answers"]} == {0, 4}
    for name in ("samples.jsonl", "answers.jsonl"):
        (sft.folder / name).unlink()
    assert ask(sft.folder) == {"steps": [], "samples": [], "answers": [], "notes": []}


def test_samples_that_are_written_or_cut_back_are_followed(tmp_path):
    run, reader = make_run(tmp_path, "a", "ppo", 5, "running"), Histories()
    path = run.folder / "samples.jsonl"
    size = path.stat().st_size
    assert ask(run.folder, reader)["steps"] == [1, 5]
    append(path, samples(10))
    assert ask(run.folder, reader)["steps"] == [1, 5, 10]
    with path.open("a") as file:
        file.write('{"step": 15, "prompt": "half')
    found = ask(run.folder, reader)
    assert found["steps"] == [1, 5, 10] and found["samples"] == samples(10)
    path.open("r+").truncate(size)
    assert ask(run.folder, reader)["steps"] == [1, 5]
    append(path, samples(7))
    found = ask(run.folder, reader)
    assert found["steps"] == [1, 5, 7] and found["samples"] == samples(7)


def test_an_episode_is_told_turn_by_turn_and_without_its_tokens(tmp_path):
    run = make_run(tmp_path, "a", "grpo", 1, "running", has_tools=True)
    row = ask(run.folder)["samples"][0]
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
    found = ask(run.folder)
    assert len(found["samples"]) == 20 and len(found["answers"]) == run_history.MAX_ANSWERS
