"""Functions that are written in the page: tried in a process of their own, kept as files, and not without the token."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hybrid_rlhf.rewards.builtin import BUILTINS
from hybrid_rlhf.studio import preflight, reward_code
from hybrid_rlhf.studio.goals import BUILTIN_REWARDS
from hybrid_rlhf.studio.studio import Refused, Studio
from hybrid_rlhf.studio.studio_app import make_app
from tests.factories.asked_new_run import PORT, TOKEN, DirectLook

COUNTS = """def reward(prompts, completions, **columns):
    return [len(c) + 10 * len(p) for p, c in zip(prompts, completions)]"""


@pytest.fixture
def studio(tmp_path):
    (tmp_path / "outputs").mkdir()
    return Studio((tmp_path / "outputs").resolve())


@pytest.fixture
def client(studio):
    from starlette.testclient import TestClient

    app = make_app(studio, [*reward_code.routes(studio), *preflight.routes(studio, DirectLook())], TOKEN, PORT)
    with TestClient(app, base_url=f"http://127.0.0.1:{PORT}", cookies={f"studio_{PORT}": TOKEN}) as found:
        yield found


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"riddle": "2 + 2?", "answer": "4"}) + "\n" + json.dumps(
        {"riddle": "9 + 9?", "answer": "18"}) + "\n")
    return {"path": str(tmp_path / "rows.jsonl"), "columns": {"prompt": "riddle"}}


def attempt(client, rows, code, answer="", token=TOKEN):
    body = {"code": code, "source": rows, "answer": answer}
    return client.post("/api/reward/try", json=body, headers={"X-Studio-Token": token})


def test_a_function_scores_the_answers_of_the_first_rows_or_one_that_is_typed(client, rows):
    found = attempt(client, rows, COUNTS).json()["rows"]
    assert found == [{"prompt": "2 + 2?", "answer": "4", "score": 61},
                     {"prompt": "9 + 9?", "answer": "18", "score": 62}]
    assert [row["score"] for row in attempt(client, rows, COUNTS, "four").json()["rows"]] == [64, 64]
    column = "def reward(completions, answer):\n    return [float(c == a) for c, a in zip(completions, answer)]"
    assert [row["score"] for row in attempt(client, rows, column, "18").json()["rows"]] == [0.0, 1.0]


@pytest.mark.parametrize(("code", "said"), [
    ("def reward(completions):\n    return completions[9]", "raised IndexError"), ("x = ", "line 1"),
    ("def other(): pass", "reward"), ("def reward(completions, **_):\n    return 3", "must return a list"),
    ("def reward(completions, **_):\n    return [1.0]", "must return a list"),
    ("def reward(completions, nothing):\n    return [1.0, 1.0]", "nothing")])
def test_what_is_wrong_with_a_function_is_one_line(client, rows, code, said):
    answer = attempt(client, rows, code)
    assert answer.status_code == 400 and said in answer.json()["error"] and "\n" not in answer.json()["error"]


def test_without_the_token_typed_again_nothing_runs_and_nothing_is_kept(client, studio, rows, tmp_path):
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n{COUNTS}"
    for token in ("", "wrong"):
        assert attempt(client, rows, code, token=token).status_code == 403
        kept = client.post("/api/reward/keep", json={"code": code}, headers={"X-Studio-Token": token})
        assert kept.status_code == 403 and "type the token" in kept.json()["error"]
    assert not (tmp_path / "ran").exists() and not (studio.home / "rewards").exists()


def test_a_function_is_kept_as_a_file_and_another_one_does_not_replace_it(studio):
    folder = studio.home / "rewards"
    assert reward_code.keep(studio, "a = 1")["function"] == f"{folder}/my_reward.py:reward"
    assert reward_code.keep(studio, "a = 1")["function"] == f"{folder}/my_reward.py:reward"
    assert reward_code.keep(studio, "a = 2")["function"] == f"{folder}/my_reward-2.py:reward"
    assert (folder / "my_reward.py").read_text() == "a = 1" and (folder / "my_reward-2.py").read_text() == "a = 2"
    for code in ("a =", "a\0"):
        with pytest.raises(Refused, match="not Python"):
            reward_code.keep(studio, code)


@pytest.mark.parametrize("name", BUILTINS)
def test_the_fields_of_a_ready_made_function_are_its_options(name):
    row, options = BUILTIN_REWARDS[name], {field.name: field for field in dataclasses.fields(BUILTINS[name])}
    names = {field for field, _, _ in row.fields}
    assert names <= {*options} and {*row.needed} <= names
    for field, _, value in row.fields:
        default = options[field].default
        if field not in row.needed:  # shown as the class has it
            assert (value or None) == (default or None)
    missing = {field.name for field in options.values()
               if field.default is field.default_factory is dataclasses.MISSING}
    assert missing <= {*row.needed}
