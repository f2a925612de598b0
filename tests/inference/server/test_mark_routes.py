"""Marks over the server's routes: what each body becomes, when the model learns, and what is refused in one line."""

from __future__ import annotations

import time

import httpx
import pytest
import torch

from hybrid_rlhf.engine.decode.serving import Serving
from hybrid_rlhf.inference.server import serve
from hybrid_rlhf.inference.teaching import Mark
from tests.factories.chats import Noting, a, u
from tests.factories.tiny import save_tiny
from tests.inference.server.tiny_server import asked, chat, content, running

PROMPT = [u("one?")]
EDITED = {"kind": "pair", "how": "edited", "prompt": PROMPT, "chosen": "a dog", "rejected": "cat"}
COMPARED = {"kind": "pair", "how": "compared", "prompt": PROMPT, "chosen": "sun", "rejected": "cat"}
BAD = {"kind": "thumb", "prompt": [*PROMPT, a("cat"), u("two?")], "completion": "fox", "is_good": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("marks") / "m", max_position_embeddings=4096)


@pytest.fixture
def learner():
    return Noting()


@pytest.fixture
def served(folder, learner):
    with running({"m": folder}, learner=learner, capacity=4096) as found:
        yield found


def post(served, body: dict, what: str = "") -> httpx.Response:
    return httpx.post(f"{served.url}/v1/marks{what}", json=body, timeout=60)


def test_each_body_becomes_a_mark_and_the_list_is_told_with_every_answer(served, learner):
    assert httpx.get(f"{served.url}/v1/marks").json() == {"line": "", "marks": []}
    lines = [post(served, body).json()["line"] for body in (EDITED, COMPARED, BAD)]
    assert lines == ["learnt 1", "learnt 2", "learnt 3"]
    assert learner.marks == [Mark("text", PROMPT, "a dog", "cat"), Mark("pair", PROMPT, "sun", "cat"),
                             Mark("thumb", [*PROMPT, a("cat"), u("two?")], "fox", is_good=False)]
    assert httpx.get(f"{served.url}/v1/marks").json()["marks"] == [
        {"kind": "text", "sign": "=", "question": "one?", "answer": "a dog"},
        {"kind": "pair", "sign": "1/2", "question": "one?", "answer": "sun"},
        {"kind": "thumb", "sign": "-", "question": "two?", "answer": "fox"}]
    undone = post(served, {"number": 3, "answer": "fox"}, "/undo").json()
    assert undone["line"].startswith("mark 3 is taken back") and len(undone["marks"]) == len(learner.marks) == 2
    assert post(served, {}, "/save").json()["line"] == "saved: out/model, from 2 marks"


def test_it_learns_outside_of_inference_mode_and_answers_again_behind_it(served, learner):
    engine, seen = served.models[0].lane.engine, []
    learn = learner.learn
    learner.learn = lambda mark: (seen.append((engine.is_inference, torch.is_grad_enabled())), learn(mark))[1]
    before = content(chat(served.url, temperature=0, max_tokens=8))
    assert post(served, EDITED).status_code == 200
    assert seen == [(False, True)] and engine.is_inference
    assert content(chat(served.url, temperature=0, max_tokens=8)) == before


def test_while_an_answer_is_drawn_a_mark_is_refused_and_the_answer_goes_on(served, learner, monkeypatch):
    step = Serving.step  # slower: the answer is not through before the mark comes
    monkeypatch.setattr(Serving, "step", lambda self: (time.sleep(0.03), step(self))[1])
    with httpx.stream("POST", f"{served.url}/v1/chat/completions",
                      json=asked("hi", max_tokens=2000, temperature=0, stream=True)) as answer:
        pieces = answer.iter_text()
        next(pieces)
        refused = post(served, EDITED)
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            409, "an answer is being drawn; wait for its end")
        assert next(pieces)
    assert learner.marks == []


@pytest.mark.parametrize(("body", "what", "words"), [
    (EDITED | {"prompt": [u([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])]}, "",
     "marks are learnt on text alone"),
    (EDITED | {"prompt": [*PROMPT, {"role": "tool", "content": "3"}]}, "", "marks are learnt on text alone"),
    ({"kind": "thumb", "prompt": PROMPT, "completion": "cat"}, "", "is_good: a thumb needs it; give it"),
    ({"kind": "thumb", "prompt": PROMPT, "is_good": True}, "", "completion: a thumb needs it; give it"),
    ({"kind": "pair", "prompt": PROMPT, "chosen": "cat"}, "", "rejected: a pair needs it; give it"),
    ({"kind": "pair", "prompt": PROMPT, "rejected": "cat"}, "", "chosen: a pair needs it; give it"),
    (EDITED | {"kind": "score"}, "", "kind: "), (EDITED | {"prompt": []}, "", "prompt: "),
    ({"number": 2}, "/undo", "only the last mark can be taken back, and that is mark 1"),
    ({"number": 1, "answer": "moon"}, "/undo", "only the last mark can be taken back, and that is mark 1: sun"),
    (COMPARED | {"prompt": [u("first")]}, "", "this answer is mark 1 already, 1/2; undo takes it back"),
    (COMPARED | {"prompt": [u("first")], "is_cut": True}, "", "this answer is mark 1 already, 1/2; undo takes it")])
def test_what_cannot_be_learnt_or_taken_back_is_one_line(served, learner, body, what, words):
    learner.marks.append(Mark("pair", [u("first")], "sun", "cat"))
    refused = post(served, body, what)
    assert refused.status_code == 400 and refused.json()["error"]["message"].startswith(words)
    assert len(learner.marks) == 1


def test_out_of_memory_while_learning_is_one_line_and_the_server_goes_on(served, learner):
    def fail(_mark: Mark) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    learner.learn = fail
    refused = post(served, EDITED)
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        400, "out of memory while learning; the marks before it are kept; say less, or take a smaller model")
    assert content(chat(served.url, max_tokens=3)) is not None


def test_without_a_learner_there_are_no_marks_and_one_model_learns(folder):
    with running({"m": folder}) as found:
        assert httpx.get(f"{found.url}/v1/marks").status_code == 404
    with pytest.raises(serve.UserError, match="one model learns"):
        serve.parse(["--model", "a", "b", "--learn", "out"])
    with pytest.raises(serve.UserError, match="start it by hybrid-rlhf serve"):
        serve.run(["--model", folder, "--learn", "out", "--port", "0"])


def test_a_mark_says_which_text_was_cut(served, learner):
    post(served, COMPARED | {"is_other_cut": True})
    post(served, BAD | {"is_cut": True})
    assert [(mark.is_cut, mark.is_other_cut) for mark in learner.marks] == [(False, True), (True, False)]


def test_models_that_cannot_answer_again_behind_a_mark_are_not_healthy(served, learner, monkeypatch):
    """The mark is kept, and no question is told to try again."""
    from hybrid_rlhf.core.errors import UserError

    def no_room(*_, **__):
        raise UserError("no room for the cache")

    monkeypatch.setattr(served.models[0].lane.engine, "serve", no_room)
    assert post(served, EDITED).status_code == 400 and len(learner.marks) == 1
    assert httpx.get(f"{served.url}/health").status_code == 503
