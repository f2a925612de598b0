"""The server with a model that learns: a mark changes the next answer, and undo restores it to the bit."""

from __future__ import annotations

import json

import httpx

from hybrid_rlhf.commands.learning_chat import with_learner
from hybrid_rlhf.inference.server.served_model import Served
from hybrid_rlhf.inference.server.worker import ModelQueue
from tests.factories.tiny import own_cache, save_tiny
from tests.inference.server.tiny_server import asked, serving

EDITED = {"kind": "pair", "how": "edited", "prompt": [{"role": "user", "content": "Which animal?"}],
          "chosen": "a little red fox", "rejected": "the sun"}


def test_a_mark_changes_the_next_answer_and_undo_restores_it_to_the_bit(tmp_path, monkeypatch):
    own_cache(monkeypatch, tmp_path / "cache")
    base, taught, seen = save_tiny(tmp_path / "base"), tmp_path / "taught", []

    def run(_argv, open_learner) -> int:
        opened, learner = open_learner(str(base), str(taught))
        model = Served("m", ModelQueue(opened.engine, 4, 256), opened.tokenizer)
        with serving([model], learner=learner) as served:
            def see() -> None:
                body = asked("Which animal?", temperature=0, max_tokens=6, logprobs=True)
                answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).json()
                seen.append([(each["token"], each["logprob"]) for each in answer["choices"][0]["logprobs"]["content"]])

            see()
            for what, body in (("", EDITED), ("/undo", {"number": 1}), ("", EDITED), ("/save", {})):
                told = httpx.post(f"{served.url}/v1/marks{what}", json=body, timeout=60)
                assert told.status_code == 200, told.text
                see()
        return len(learner.marks)

    assert with_learner("serve", run, ["--api_key", "a secret", "--api_key=a secret", "--learn", str(taught)]) == 1
    start, learnt, undone, again, saved = seen
    assert learnt != start and undone == start and again == learnt == saved
    record = json.loads((taught / "run.json").read_text())
    assert record["status"] == "finished" and (taught / "model" / "config.json").is_file()
    assert record["command"] == f"hybrid-rlhf serve --api_key ... --api_key=... --learn {taught}"
