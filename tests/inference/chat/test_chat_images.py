"""Pictures in a chat: they go with a question, are part of the history, and are saved as a row that SFT reads."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data.datasets import DataConfig, build
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.inference.chat import repl
from hybrid_rlhf.inference.chat.session import Session, obey
from hybrid_rlhf.inference.conversation import Conversation, open_conversation
from hybrid_rlhf.models.tokenizer import load_tokenizer
from hybrid_rlhf.training.registry import READS
from tests.factories.chats import conversation
from tests.factories.tiny import own_cache, save_tiny
from tests.factories.vision import folder, greedy_chat

PICTURE = {"type": "image"}
GREEDY = SamplingConfig(max_new_tokens=6, temperature=0)


def words(text: str) -> dict:
    return {"type": "text", "text": text}


@pytest.fixture
def pictures(tmp_path, monkeypatch) -> Path:
    own_cache(monkeypatch, tmp_path / "cache")
    for name, size, colour in (("red.png", (32, 32), "red"), ("blue sky.png", (24, 40), "blue"),
                               ("tall.png", (4, 1024), "red"), ("large.png", (2048, 1024), "green")):
        Image.new("RGB", size, colour).save(tmp_path / name)
    (tmp_path / "no.png").write_text("text")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def talk() -> Conversation:
    opened = open_conversation(folder("qwen3_vl"), GREEDY)
    opened.engine.eos_ids = []  # what it says has six tokens
    return opened


def typed(monkeypatch, capsys, session: Session, *lines: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    code = repl.talk(session)
    return code, *capsys.readouterr()


def roles(*contents) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def test_pictures_of_several_turns_are_seen_as_by_transformers(pictures, talk, monkeypatch, capsys):
    path = folder("qwen3_vl")
    code, _, err = typed(monkeypatch, capsys, Session({"m": talk}), "/image red.png", "what?", "and then?",
                         "/image 'blue sky.png'", "this?")
    assert code == 0, err
    assert [line for line in err.splitlines() if "cut: " not in line] == [  # a token has 8 x 8 pixels
        "red.png, 32 x 32, 16 tokens; it goes with your next question",
        "blue sky.png, 24 x 40, 15 tokens; it goes with your next question"]
    said = [m["content"] for m in talk.messages if m["role"] == "assistant"]
    history = roles([PICTURE, words("what?")], said[0], "and then?", said[1], [PICTURE, words("this?")])
    assert said == [greedy_chat(path, history[:turn], ["red.png", "blue sky.png"][: 1 + turn // 5], 6)[0]
                    for turn in (1, 3, 5)]


def test_the_number_of_tokens_that_is_said_is_what_the_prompt_has(pictures, talk):
    said = obey(Session({"m": talk}), "/image red.png large.png").text
    plain, seen = (greedy_chat(folder("qwen3_vl"), roles(content), images, 1)[1] for content, images in (
        ("x", []), ([PICTURE, words("x")], ["red.png"])))
    count = seen - plain - 2  # of vision start and end
    assert said.startswith(f"red.png, 32 x 32, {count} tokens; large.png, 2048 x 1024 (read as 1448 x 724), ")
    assert said.endswith(" tokens; they go with your next question")


def test_pictures_are_part_of_the_history(pictures, talk):
    session = Session({"m": talk})
    obey(session, "/image red.png")
    "".join(talk.answer("what?", session.images))
    session.images = []
    assert obey(session, "/history").text.startswith("user: [image red.png] what?\nassistant: ")
    first = talk.prompt().ids
    again = obey(session, "/again")
    assert (talk.messages, [image.path for image in session.images]) == ([], [str(pictures / "red.png")])
    "".join(talk.answer(again.question, session.images))
    assert talk.prompt().ids[: -6] == first[: -6]
    session.images = []
    edited = obey(session, "/edit why?")
    assert (edited.question, len(session.images)) == ("why?", 1)
    "".join(talk.answer(edited.question, session.images))
    session.images = []
    assert obey(session, "/undo").text == "taken back: [image red.png] why?"
    assert (talk.messages, session.images) == ([], [])
    obey(session, "/image red.png")
    obey(session, "/reset")
    assert session.images == []


def test_a_saved_conversation_is_read_by_sft_and_by_load(pictures, talk, capsys):
    session = Session({"m": talk})
    obey(session, "/image red.png")
    "".join(talk.answer("what?", session.images))
    obey(session, "/save talk.jsonl")
    row = json.loads((pictures / "talk.jsonl").read_text())
    assert row["images"] == [str(pictures / "red.png")]
    assert row["messages"][0] == {"role": "user", "content": [PICTURE, words("what?")]}
    trained, messages = _sft_rows("talk.jsonl")[0], list(talk.messages)
    obey(session, "/reset")
    obey(session, "/load talk.jsonl")
    assert talk.messages == messages and session.images == []
    talk.messages.pop()
    prompt = talk.prompt()
    start = trained["loss_mask"].index(True)
    assert trained["input_ids"][:start] == prompt.ids
    assert [tuple(image) for image in trained["images"]] == [tuple(image) for image in prompt.images]


def _sft_rows(path: str) -> list[dict]:
    config = DataConfig([path], eval_fraction=0.0, max_length=512)
    return list(build(config, READS["sft"], load_tokenizer(folder("qwen3_vl")), 0).train)


@pytest.mark.parametrize("line, reason", [
    ("/image gone.png", "gone.png cannot be read (No such file or directory)"),
    ("/image no.png", "no.png cannot be read (Pillow knows no such image)"),
    ("/image tall.png", "tall.png is refused by the model's processor"),
    ("/image", "/image takes the path of a picture"),
    ("/image 'red.png", "No closing quotation"),
])
def test_a_picture_that_cannot_be_read_is_one_clear_line(pictures, talk, monkeypatch, capsys, line, reason):
    session = Session({"m": talk})
    code, out, err = typed(monkeypatch, capsys, session, line)
    assert (code, out, err.count("\n"), session.images) == (2, "", 1, []) and reason in err, err


def test_a_model_without_a_reader_says_that_it_reads_no_images(pictures, tmp_path, monkeypatch, capsys, talk):
    plain = open_conversation(save_tiny(tmp_path / "plain"), GREEDY)
    code, _, err = typed(monkeypatch, capsys, Session({"plain": plain}), "/image red.png")
    assert (code, err.count("\n")) == (2, 1) and "plain reads no images" in err
    both = Session({"seeing": talk, "plain": plain}, current="seeing", is_comparing=True)
    with pytest.raises(UserError, match="plain reads no images"):
        obey(both, "/image red.png")
    both.is_comparing = False
    obey(both, "/image red.png")
    code, _, err = typed(monkeypatch, capsys, both, "/compare what?")
    assert "the pictures are taken back with the question" in err and "error: this conversation cannot go on" in err


def test_an_answer_about_a_picture_is_not_scored_which_is_said(pictures, talk, monkeypatch, capsys):
    class Judge:
        def score(self, prompts, _completions):
            return [0.5] * len(prompts)

    session = Session({"m": talk}, scorer=Judge(), is_scoring=True)
    _, _, err = typed(monkeypatch, capsys, session, "hello", "/image red.png", "what?")
    assert "(score 0.500)" in err and err.splitlines()[-1] == "(no score: the reward model reads no images)"


def test_a_prompt_with_pictures_prints_the_answer_alone(pictures, capsys):
    code = repl.main(["--model", folder("qwen3_vl"), "--prompt", "what?", "--image", "red.png", "blue sky.png",
                      "--temperature", "0", "--max_new_tokens", "4"])
    out, err = capsys.readouterr()
    truth, _ = greedy_chat(folder("qwen3_vl"), roles([PICTURE, PICTURE, words("what?")]),
                           ["red.png", "blue sky.png"], 4)
    assert (code, out) == (0, truth + "\n"), err
    assert repl.main(["--model", folder("qwen3_vl"), "--prompt", "what?", "--image", "gone.png"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].startswith("error: gone.png cannot be read")


def test_a_character_that_marks_images_inside_is_text_in_a_question():
    talk = conversation("cat")
    "".join(talk.answer("a \ufdd1 b"))
    assert "images" not in talk.messages[0] and "\ufdd1 b" in talk.engine.prompts[0]
