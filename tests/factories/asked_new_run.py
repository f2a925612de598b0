"""What a page for a new run asks, answered in the test's own process; tiny models and rows to ask about."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from hybrid_rlhf.studio import preflight
from hybrid_rlhf.studio.goals import STUDIO_GOALS
from hybrid_rlhf.studio.studio import Refused, Studio
from hybrid_rlhf.studio.studio_app import make_app
from tests.factories.stage_options import write_rows
from tests.factories.tiny import chatml_tokenizer, own_cache, save_tiny, tiny_scalar_model

TOKEN, PORT = "t" * 32, 8090
ASKS = {  # what a goal asks for -> the option that it sets
    "model": "model.model_name_or_path", "data": "data.sources", "reward_functions": "reward.functions",
    "reward_model": "roles.reward.model_name_or_path", "judge": "reward.judge.model",
    "teacher": "roles.teacher.model_name_or_path", "tools": "environment.tools"}


@contextmanager
def tiny_place(folder: Path) -> Iterator[Path]:
    """base, teacher (a judge too), score (a reward model); sft, reward, ppo and sums.jsonl."""
    write_rows(folder)
    save_tiny(folder / "base")
    save_tiny(folder / "teacher", 1, max_position_embeddings=2048)  # a judge reads its rubric too
    (folder / "sums.jsonl").write_text("".join(
        json.dumps({"prompt": f"{i} + 1", "answer": str(i + 1)}) + "\n" for i in range(30)))
    tiny_scalar_model().save_pretrained(folder / "score")
    chatml_tokenizer().save_pretrained(folder / "score")
    patch = pytest.MonkeyPatch()
    own_cache(patch, folder / "cache")
    yield folder
    patch.undo()


@contextmanager
def asking(place: Path) -> Iterator[TestClient]:
    """A client of the addresses behind the page; runs would go below place/outputs."""
    studio = Studio((place / "outputs").resolve())
    app = make_app(studio, preflight.routes(studio, DirectLook()), TOKEN, PORT)
    with TestClient(app, base_url=f"http://127.0.0.1:{PORT}", follow_redirects=False) as found:
        assert found.get("/", params={"token": TOKEN}).status_code == 303
        yield found


def post(client: TestClient, kind: str, status: int = 200, **body: object) -> dict:
    answer = client.post(f"/api/{kind}", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    return answer.json()


def answers(place: Path, goal: str) -> dict:
    """What a person answers to a goal's questions, as options."""
    given = {"model": str(place / "base"), "reward_functions": ["builtin:numeric_match"], "tools": [],
             "reward_model": str(place / "score"), "judge": str(place / "teacher"), "teacher": str(place / "teacher"),
             "data": [str(place / f"{rows_of(goal)}.jsonl")]}
    found = {ASKS[ask]: given[ask] for ask in STUDIO_GOALS[goal].asks}
    return {name: value for name, value in found.items() if value}


def rows_of(goal: str) -> str:
    found = {"function": "sums", "imitate": "sft", "prefer": "reward", "reward": "reward", "three_stages": "reward"}
    return found.get(goal, "ppo")


class DirectLook:
    def ask(self, kind: str, asked: dict) -> dict:
        reply = json.loads(json.dumps(preflight.reply(kind, json.loads(json.dumps(asked))), allow_nan=False))
        if "error" in reply:
            assert reply["error"]["status"] != 500, reply["error"]["traceback"]
            raise Refused(reply["error"]["status"], reply["error"]["text"], reply["error"]["option"])
        return reply["answer"]

    def close(self) -> None:
        pass
