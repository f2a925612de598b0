"""Judges of answers about images: what an address is sent, what a model here reads, and the line where neither sees."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.image_files import ImageRef, look_at
from hybrid_rlhf.data.turns import IMAGE
from hybrid_rlhf.models.images import load_reader
from hybrid_rlhf.rewards.judge import JudgeConfig, open_judge
from hybrid_rlhf.rewards.judge.asking import Budget
from hybrid_rlhf.rewards.judge.local_backend import LocalBackend
from hybrid_rlhf.rollout import Prompts, Rollout
from tests.factories.judges import ONE, in_order, judge_server, said
from tests.factories.tiny import save_tiny
from tests.factories.vision import folder, greedy_chat, image_files, image_text_model

YES = said('fine {"ok": "yes"}')


@pytest.fixture
def server():
    with judge_server() as state:
        state.answers = [(200, YES)]
        yield state


def judge(server, **settings):
    return open_judge(JudgeConfig(url=server.url, rubric=ONE, timeout=5.0, **settings))


def asked(text: str, *images: ImageRef) -> list[dict]:
    return [{"role": "user", "content": IMAGE * len(images) + text} | ({"images": list(images)} if images else {})]


def rollout(prompts: list[list[dict]], answers: list[str]) -> Rollout:
    images = [tuple(prompt[0].get("images", ())) for prompt in prompts]
    made = Prompts([[i] for i in range(len(prompts))], ["q"] * len(prompts), {"prompt": prompts}, images)
    return Rollout.from_responses(made, [[7]] * len(answers), [True] * len(answers), 0, answers)


def picture(path: Path, colour: str, size: tuple[int, int] = (40, 20)) -> ImageRef:
    Image.new("RGB", size, colour).save(path)
    return look_at(str(path))


def parts_of(server, i: int = 0) -> list[dict]:
    return server.asked[i]["messages"][-1]["content"]


def test_an_address_is_sent_the_images_as_data_urls_in_their_order(server, tmp_path, capsys):
    red, large = picture(tmp_path / "red.png", "red"), picture(tmp_path / "large.jpg", "blue", (400, 200))
    source = judge(server, images=True)
    prompts = [asked("Which?", red, large._replace(width=200, height=100)), asked("Hm?")]
    assert source.score(rollout(prompts, [f"a {IMAGE} b", "c"])) == [1.0, 1.0]
    with_images = next(body for body in server.asked if not isinstance(body["messages"][-1]["content"], str))
    *images, text = with_images["messages"][-1]["content"]
    opened = [Image.open(BytesIO(base64.b64decode(part["image_url"]["url"].removeprefix("data:image/png;base64,"))))
              for part in images]
    assert [part["type"] for part in images] == ["image_url"] * 2
    assert [image.size for image in opened] == [(40, 20), (200, 100)]  # the second as the policy reads it
    assert opened[0].getpixel((5, 5)) == (255, 0, 0)
    assert opened[1].getpixel((5, 5)) == pytest.approx((0, 0, 255), abs=3)
    assert text["type"] == "text" and "[user] [image][image]Which?" in text["text"] and IMAGE not in text["text"]
    assert capsys.readouterr().err == ""


def test_a_judge_that_is_sent_none_reads_a_word_for_them_and_one_line_says_so(server, tmp_path, capsys):
    source = judge(server)
    for _ in range(2):
        source.score(rollout([asked("What?", picture(tmp_path / "a.png", "red"))], ["a cat"]))
    assert "[user] [image]What?" in parts_of(server) and IMAGE not in json.dumps(server.asked)
    assert capsys.readouterr().err == ("judge: it reads [image] in place of the images of prompts; reward.judge.images "
                                       "true sends them\n")


def test_the_same_image_under_another_name_is_not_asked_again_and_another_one_is(server, tmp_path):
    source = judge(server, images=True)
    for name, colour, count in (("a.png", "red", 1), ("b.png", "red", 1), ("b.png", "blue", 2), ("a.png", "lime", 3)):
        source.score(rollout([asked("What?", picture(tmp_path / name, colour))], ["a cat"]))
        assert len(server.asked) == count
    sent = parts_of(server, 2)[0]["image_url"]["url"].removeprefix("data:image/png;base64,")
    assert Image.open(BytesIO(base64.b64decode(sent))).getpixel((5, 5)) == (0, 255, 0)  # what a.png is now
    (tmp_path / "b.png").unlink()
    with pytest.raises(UserError, match=r"image \S+b\.png cannot be read .*put it back"):
        source.score(rollout([asked("What?", ImageRef(str(tmp_path / "b.png"), 40, 20))], ["a dog"]))


def test_images_count_against_the_price_that_a_call_may_have(server, tmp_path):
    backend = judge(server, images=True).asker.backend
    plain, seeing = ([{"role": "user", "content": "x"} | more] for more in (
        {}, {"images": [picture(tmp_path / "a.png", "red", (64, 32))]}))
    more = backend._most_tokens(seeing, {})[0] - backend._most_tokens(plain, {})[0]
    assert 64 * 32 / 256 <= more < 64 * 32 / 256 + 200  # and the bytes of its name


def test_a_model_here_is_told_apart_by_whether_it_reads_images(tmp_path, capsys):
    with pytest.raises(UserError, match=r"reward\.judge\.images is for reward\.judge\.url"):
        JudgeConfig(model="m", images=True)
    plain = open_judge(JudgeConfig(model=save_tiny(tmp_path / "plain", max_position_embeddings=2048), rubric=ONE,
                                   dtype="float32", max_new_tokens=2, on_failure="skip", retries=0))
    plain.score(rollout([asked("What?", image_files()[0])], ["a cat"]))
    assert f"judge: it reads [image] in place of the images of prompts; {tmp_path / 'plain'} reads no images\n" in (
        capsys.readouterr().err)


def test_replies_about_images_are_those_of_transformers():
    path, files = folder("qwen3_vl"), image_files()
    chats = [asked("what", files[0]), asked("this and that", files[1], files[2]), asked("text alone")]
    backend = LocalBackend(path, Budget(), dtype="float32", batch_size=2)
    replies = in_order(backend.complete(chats, 5, seed=0))
    assert backend.reads_images
    for chat, reply in zip(chats, replies, strict=True):
        images = [image.path for image in chat[0].get("images", ())]
        text = {"type": "text", "text": chat[0]["content"].replace(IMAGE, "")}
        expected, _ = greedy_chat(path, [{"role": "user", "content": [*[{"type": "image"}] * len(images), text]}],
                                  images, 5)
        assert expected.startswith(reply)


@torch.no_grad()
def test_probabilities_of_words_about_images_are_the_model_s_own():
    path, files = folder("qwen3_vl"), image_files()
    backend = LocalBackend(path, Budget(), dtype="float32")
    found = in_order(backend.choose([asked("hello", files[0]), asked("hello", files[1])], ("A", "B")))
    model, processor = image_text_model("qwen3_vl"), load_reader(path)._processor
    vocab = processor.tokenizer.get_vocab()
    ways = [space for space in ("", "Ġ", "▁") if space + "A" in vocab and space + "B" in vocab]
    for image, of_words in zip(files, found, strict=False):
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hello"}]}]
        text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = processor(text=[text], images=[Image.open(image.path).convert("RGB")], return_tensors="pt",
                           add_special_tokens=False)
        chances = model(**inputs).logits[0, -1].softmax(-1)
        assert of_words == pytest.approx([sum(float(chances[vocab[space + word]]) for space in ways)
                                          for word in ("A", "B")], rel=1e-3)
    assert found[0] != found[1]
