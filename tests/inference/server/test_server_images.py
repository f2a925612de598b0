"""Images in a server's chats: OpenAI's parts with data URLs, the answers of transformers, and what is refused."""

from __future__ import annotations

import base64
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from PIL import Image

from hybrid_rlhf.core import image_files
from hybrid_rlhf.inference.scorer import Scorer
from hybrid_rlhf.inference.server.app import Server
from hybrid_rlhf.inference.server.serve import default_body_bytes
from hybrid_rlhf.inference.server.served_model import Limits
from hybrid_rlhf.models.images import load_reader
from hybrid_rlhf.models.load import ModelConfig, load_causal_lm
from tests.factories.tiny import save_tiny
from tests.factories.vision import folder, greedy_chat
from tests.factories.vision import image_files as drawn_files
from tests.inference.server.tiny_server import chat, content, events, running, until

PICTURE = {"type": "image"}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Where the server makes its folder for images: not where those of other tests are."""
    place = tmp_path_factory.mktemp("images")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(place))
        yield place


@pytest.fixture(scope="module")
def served(tmp_path_factory, reward_folder, images):
    scorer = Scorer(reward_folder)
    scorer.open()
    plain = save_tiny(tmp_path_factory.mktemp("plain"))
    with running({"seeing": folder("qwen3_vl"), "plain": plain}, scorer=scorer,
                 limits=Limits(max_body_bytes=3_000_000)) as found:
        for model in found.models:  # what is said has the length that is asked for
            model.lane.serving.stops = frozenset()
            model.lane.serving._scheduler.stops = frozenset()
        yield found


def url_of(path: str | Path, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(Path(path).read_bytes()).decode()}"


def image(path: str | Path) -> dict:
    return {"type": "image_url", "image_url": {"url": url_of(path), "detail": "auto"}}


def words(text: str) -> dict:
    return {"type": "text", "text": text}


def user(*parts: dict) -> dict:
    return {"role": "user", "content": list(parts)}


def ask(served, *messages: dict, **settings) -> httpx.Response:
    body = {"messages": list(messages), "model": "seeing", "temperature": 0, "max_tokens": 6} | settings
    return httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60)


FILES = [file.path for file in drawn_files()]


def test_an_answer_about_images_is_that_of_transformers_and_usage_counts_their_tokens(served):
    truth, size = greedy_chat(folder("qwen3_vl"), [{"role": "user", "content": [PICTURE, words("what"), PICTURE]}],
                              FILES[:2], 6)
    answer = ask(served, user(image(FILES[0]), words("what"), image(FILES[1])))
    assert content(answer) == truth
    assert answer.json()["usage"] == {"prompt_tokens": size, "completion_tokens": 6, "total_tokens": size + 6}


def test_a_later_image_and_text_beside_it_at_once_are_answered_as_alone(served):
    first = [{"role": "user", "content": [PICTURE, words("what")]}]
    said = greedy_chat(folder("qwen3_vl"), first, FILES[:1], 6)[0]
    longer = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": [PICTURE, words("this")]}]
    ours = [user(image(FILES[0]), words("what")), {"role": "assistant", "content": said},
            user(image(FILES[1]), words("this"))]
    plain = content(ask(served, user(words("hello"))))
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda messages: content(ask(served, *messages)),
                                [ours, [user(words("hello"))], ours[:1]] * 2))
    assert answers == [greedy_chat(folder("qwen3_vl"), longer, FILES[:2], 6)[0], plain, said] * 2


def test_a_stream_about_an_image_is_the_whole_answer(served):
    settings = dict(seed=5, temperature=1, stream=True, stream_options={"include_usage": True})
    whole = ask(served, user(image(FILES[0]), words("what")), seed=5, temperature=1)
    found = events(ask(served, user(image(FILES[0]), words("what")), **settings))
    assert "".join(c["delta"].get("content", "") for e in found for c in e["choices"]) == content(whole)
    assert found[-1]["usage"] == whole.json()["usage"]


def test_logprobs_of_an_answer_about_an_image_are_the_models(served):
    reader = load_reader(folder("qwen3_vl"))
    answer = ask(served, user(image(FILES[0]), words("what")), logprobs=True)
    scores = answer.json()["choices"][0]["logprobs"]["content"]
    model = load_causal_lm(ModelConfig(folder("qwen3_vl"), dtype="float32")).eval()
    tokenizer = reader._processor.tokenizer
    text = tokenizer.apply_chat_template([{"role": "user", "content": [PICTURE, words("what")]}], tokenize=False,
                                         add_generation_prompt=True)
    inputs = dict(reader._processor(text=[text], images=[Image.open(FILES[0]).convert("RGB")], return_tensors="pt"))
    with torch.no_grad():
        made = model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0,
                              suppress_tokens=sorted(reader.token_ids))
        inputs |= {"input_ids": made, "attention_mask": torch.ones_like(made),
                   "mm_token_type_ids": reader.types(made)}
        logprobs = model(**inputs).logits.log_softmax(-1)[0, -7:-1]
    truth = logprobs.gather(1, made[0, -6:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([score["logprob"] for score in scores]), truth, atol=2e-4, rtol=1e-4)


def test_images_are_files_only_while_a_request_uses_them(served, images):
    (place,) = images.glob("hybrid_rlhf_images_*")
    content(ask(served, user(image(FILES[0]), words("what"))))
    assert ask(served, user(image(FILES[0]), image(FILES[1]), words("x" * 3000))).status_code == 400  # too long
    assert until(lambda: not any(place.iterdir()))


def test_a_file_of_two_requests_stays_until_both_have_ended(tmp_path):
    server, path = Server([], None, Limits(), None), tmp_path / "a"
    server.images = tmp_path
    path.write_text("")
    server._used.update([str(path)] * 3)  # twice in one of them
    server._forget([str(path)] * 2)
    assert path.exists()
    server._forget([str(path)])
    assert not path.exists()


def test_the_folder_of_images_goes_with_the_server(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with running({"seeing": folder("qwen3_vl")}):
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def broken(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize("messages, reason", [
    ([user(broken("https://example.com/a.png"))], "read from a data URL (data:image/png;base64,...), never from an"),
    ([user(broken("file:///etc/passwd"))], "read from a data URL"),
    ([user(broken("/etc/hostname"))], "read from a data URL"),
    ([user(broken("data:image/svg+xml;base64,PHN2Zy8+"))], "an image that cannot be read (Pillow knows no such image)"),
    ([user(broken("data:image/png;base64,x"))], "neither a path nor a data URL nor bytes"),
    ([user(broken("data:text/html;base64,AAAA"))], "read from a data URL"),
    ([user({"type": "image_url"})], "read from a data URL"),
    ([user({"type": "image_url", "image_url": 7})], "read from a data URL"),
    ([user({"type": "image_url", "image_url": {"path": FILES[0]}})], "read from a data URL"),
    ([user({"type": "input_audio"})], "only text and image_url can be read here"),
    ([user(words("a")), {"role": "assistant", "content": [image(FILES[0])]}, user(words("b"))],
     "an answer has no images"),
    ([user(*[image(FILES[0])] * 17)], "there are 17 images, and at most 16 are read at once"),
])
def test_what_cannot_be_read_is_refused_in_one_line(served, messages, reason):
    answer = ask(served, *messages)
    error = answer.json()["error"]
    assert answer.status_code == 400 and reason in error["message"] and "\n" not in error["message"], error
    assert error["param"] == "messages"


def test_an_image_of_too_many_pixels_is_refused(served, monkeypatch):
    monkeypatch.setattr(image_files, "MAX_FILE_PIXELS", 100)
    answer = ask(served, user(image(FILES[0]), words("what")))
    assert answer.status_code == 400 and "has more than 100 pixels" in answer.text


def test_sixteen_images_are_read(served):
    answer = ask(served, user(*[image(FILES[2])] * 16, words("x")), max_tokens=1)
    truth, size = greedy_chat(folder("qwen3_vl"), [{"role": "user", "content": [*[PICTURE] * 16, words("x")]}],
                              [FILES[2]] * 16, 1)
    assert (content(answer), answer.json()["usage"]["prompt_tokens"]) == (truth, size)


def test_a_model_without_a_reader_and_scores_and_completions_take_no_images(served):
    answer = ask(served, user(image(FILES[0]), words("what")), model="plain")
    assert answer.status_code == 400 and "plain reads no images" in answer.json()["error"]["message"]
    scored = httpx.post(f"{served.url}/score", timeout=60, json={
        "prompts": [[user(image(FILES[0]), words("what"))]], "completions": ["a"]})
    assert scored.status_code == 400 and "only text is scored here" in scored.text
    completed = httpx.post(f"{served.url}/v1/completions", timeout=60, json={
        "model": "seeing", "prompt": [user(image(FILES[0]))]})
    assert completed.status_code == 400 and "neither a string nor a list of token ids" in completed.text
    assert content(chat(served.url, "hi", model="plain", max_tokens=2))


def test_bodies_may_be_larger_where_a_model_reads_images(served):
    seeing, plain = served.models
    assert (default_body_bytes([plain]), default_body_bytes([plain, seeing])) == (2**20, 20 * 2**20)
    assert plain.no_images and seeing.no_images is None
