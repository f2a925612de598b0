"""/v1/completions: OpenAI's shapes, transformers' numbers, and what it refuses."""

from __future__ import annotations

import json

import httpx
import pytest
import torch

from hybrid_rlhf.inference.server import served_model
from hybrid_rlhf.inference.server.served_model import Limits
from tests.factories.tiny import save_tiny
from tests.inference.server.tiny_server import chat, content, events, running

PROMPT = "Once upon a time there was a \u4e16 fox"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(folder):
    with running({"a": folder}, limits=Limits(max_queue=8, max_body_bytes=50_000)) as found:
        yield found


@pytest.fixture(scope="module")
def truth(folder):
    """(tokenizer, log-softmax of transformers' own logits of some ids)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def logprobs(ids: list[int]) -> torch.Tensor:
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)

    return tokenizer, logprobs


def complete(served, prompt=PROMPT, **settings) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/completions", json={"prompt": prompt, **settings}, timeout=60)


def choices(answer: httpx.Response) -> list[dict]:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def _check(found: dict, ids: list[int], truth, num_top: int) -> None:
    """Log-probabilities of the sequence `ids` of which `found` has the last tokens."""
    numbers, first = truth[1](ids), len(ids) - len(found["tokens"])
    for place, (logprob, tops) in enumerate(zip(found["token_logprobs"], found["top_logprobs"], strict=True), first):
        if place == 0:
            assert (logprob, tops) == (None, None)
            continue
        assert logprob == pytest.approx(float(numbers[place - 1, ids[place]]), abs=1e-4)
        want = numbers[place - 1].sort(descending=True).values[:num_top].tolist()
        assert sorted(tops.values(), reverse=True)[:num_top] == pytest.approx(want, abs=1e-4)
        is_among = numbers[place - 1].argsort(descending=True)[:num_top].eq(ids[place]).any()
        assert len(tops) == num_top + (not is_among) and logprob in tops.values()


# --- answers ---------------------------------------------------------------------------------------------------------

def test_a_prompt_is_gone_on_from_as_it_is_without_a_template(served, truth):
    tokenizer, logprobs = truth
    ids = tokenizer(PROMPT)["input_ids"]
    for _ in range(12):
        ids.append(int(logprobs(ids)[-1].argmax()))
    want = tokenizer.decode(ids[len(tokenizer(PROMPT)["input_ids"]):])
    answer = complete(served, temperature=0, max_tokens=12)
    found = answer.json()
    assert (found["object"], found["model"], choices(answer)) == ("text_completion", "a", [
        {"index": 0, "text": want, "logprobs": None, "finish_reason": "length"}])
    count = len(ids) - 12
    assert found["usage"] == {"prompt_tokens": count, "completion_tokens": 12, "total_tokens": count + 12}
    assert choices(complete(served, tokenizer(PROMPT)["input_ids"], temperature=0, max_tokens=12)) == choices(answer)
    assert len(complete(served, temperature=0, min_tokens=16).json()["choices"][0]["text"]) > 0  # OpenAI's 16 tokens


def test_several_prompts_have_the_answers_that_each_has_alone_in_order(served):
    prompts = ["red", "the fox", "A wood."]
    settings = dict(seed=3, max_tokens=9, n=2, temperature=0.05)
    found = choices(complete(served, prompts, **settings))
    assert [c["index"] for c in found] == list(range(6))
    alone = [c["text"] for prompt in prompts for c in choices(complete(served, prompt, **settings))]
    assert [c["text"] for c in found] == alone and len(set(alone)) == 6


def test_an_echo_begins_with_the_prompt_and_a_stop_string_ends_what_follows(served):
    whole = choices(complete(served, seed=3, max_tokens=40))[0]["text"]
    stop = whole[10:13]
    [cut] = choices(complete(served, seed=3, max_tokens=40, stop=[stop], echo=True, logprobs=0))
    assert cut["text"] == PROMPT + whole[: whole.index(stop)] and cut["finish_reason"] == "stop"
    assert max(cut["logprobs"]["text_offset"]) < len(cut["text"])


# --- log-probabilities -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("settings", [dict(max_tokens=0), dict(max_tokens=1, temperature=0), dict(max_tokens=1),
                                      dict(max_tokens=7, temperature=0.7, top_p=0.8, repetition_penalty=1.3),
                                      dict(max_tokens=1, temperature=0, min_tokens=1)], ids=str)
@pytest.mark.parametrize("num_top", [0, 20])
def test_the_log_probabilities_of_an_echo_are_those_of_transformers(served, truth, settings, num_top):
    tokenizer, logprobs = truth
    ids = tokenizer(PROMPT)["input_ids"]
    answer = complete(served, ids, echo=True, logprobs=num_top, seed=1, **settings)
    [choice] = choices(answer)
    found = choice["logprobs"]
    told = [_ids_by_text(served)[token] for token in found["tokens"][len(ids):]]
    assert len(told) == min(settings["max_tokens"], answer.json()["usage"]["completion_tokens"] + 1)
    _check(found, [*ids, *told], truth, num_top)
    if settings["max_tokens"] and settings.get("temperature") == 0:
        best = logprobs(ids)[-1]
        assert told == [int((best if "min_tokens" not in settings else best.index_fill(
            0, torch.tensor([1, 3]), -99.0)).argmax())]
    for before, token, start in zip(["", *found["tokens"]], found["tokens"], found["text_offset"], strict=False):
        has_no_place = any(each.startswith(("bytes:", "<|")) for each in (before, token))  # random bytes, and ends
        assert has_no_place or choice["text"][start:].startswith(token)
    assert found["text_offset"][: len(ids)] == sorted(found["text_offset"][: len(ids)])
    assert found["text_offset"][len(ids):][:1] in ([], [len(PROMPT)])


def _ids_by_text(served) -> dict[str, int]:
    return {served.models[0].token_text.of(i)[0]: i for i in range(300)}


def test_without_an_echo_the_numbers_are_those_of_the_answer_alone(served, truth):
    ids = truth[0](PROMPT)["input_ids"]
    settings = dict(seed=5, max_tokens=6, logprobs=2)
    [echoed], [bare] = (choices(complete(served, **settings, echo=echo)) for echo in (True, False))
    assert bare["text"] == echoed["text"][len(PROMPT):]
    ours, want = bare["logprobs"], {name: numbers[len(ids):] for name, numbers in echoed["logprobs"].items()}
    assert ours["tokens"] == want["tokens"]
    assert ours["token_logprobs"] == pytest.approx(want["token_logprobs"], abs=1e-5)
    assert ours["text_offset"] == [start - len(PROMPT) for start in want["text_offset"]]


def test_the_end_of_an_answer_is_a_token_without_text(folder, tmp_path):
    """What reads the numbers of a prompt drops the one token that was asked for: it must be there."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        states = model.model(torch.tensor([[60, 61, 62]])).last_hidden_state[0, -1]
        model.lm_head.weight[3] = 10 * states
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    with running({"a": str(tmp_path)}) as found:
        for settings in (dict(temperature=0), dict(temperature=0, min_tokens=0, repetition_penalty=1.01)):
            [choice] = choices(complete(found, [60, 61, 62], max_tokens=1, echo=True, logprobs=1, **settings))
            assert choice["logprobs"]["tokens"][3:] == ["<|im_end|>"] and choice["finish_reason"] == "stop"
            assert choice["logprobs"]["text_offset"][3] == len(choice["text"]) == 3


def test_a_tokenizers_own_beginning_is_read_and_is_no_part_of_the_echo(tmp_path):
    from tokenizers.processors import TemplateProcessing

    from tests.factories.tiny import chatml_tokenizer

    tokenizer = chatml_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|endoftext|>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 1)])
    save_tiny(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with running({"a": str(tmp_path)}) as found:
        for prompt, offsets in (("", [0]), ("ab", [0, 0, 1]), ("<|endoftext|>ab", [0, 13, 14])):
            [choice] = choices(complete(found, prompt, max_tokens=0, echo=True, logprobs=0))
            assert (choice["text"], choice["logprobs"]["text_offset"]) == (prompt, offsets)
            assert choice["logprobs"]["tokens"] == ["<|endoftext|>", "a", "b"][: len(offsets)]
            assert choice["logprobs"]["token_logprobs"][0] is None
        [bare] = choices(complete(found, "ab", max_tokens=0, echo=True, logprobs=0, add_special_tokens=False))
        assert (bare["logprobs"]["tokens"], bare["logprobs"]["text_offset"]) == (["a", "b"], [0, 1])
        assert complete(found, "", max_tokens=1, add_special_tokens=False).status_code == 400


# --- streams ---------------------------------------------------------------------------------------------------------

def test_a_stream_is_the_whole_completion_in_pieces(served):
    settings = dict(seed=5, max_tokens=30, n=2, echo=True)
    whole = complete(served, ["red", "sun"], **settings)
    found = events(complete(served, ["red", "sun"], **settings, stream=True, stream_options={"include_usage": True}))
    assert {e["object"] for e in found} == {"text_completion"} and found[-1]["usage"] == whole.json()["usage"]
    for choice in choices(whole):
        parts = [c for e in found for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in parts) == choice["text"]
        assert [c["finish_reason"] for c in parts if c["finish_reason"]] == [choice["finish_reason"]]


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_streams_log_probabilities_are_the_whole_answers(served, temperature):
    settings = dict(seed=8, max_tokens=25, logprobs=0, temperature=temperature)
    [whole] = choices(complete(served, **settings))
    found = events(complete(served, **settings, stream=True))
    parts = [c["logprobs"] for e in found for c in e["choices"]]
    for name in ("tokens", "text_offset"):
        assert [each for part in parts for each in part[name]] == whole["logprobs"][name]
    numbers = [each for part in parts for each in part["token_logprobs"]]
    assert numbers == pytest.approx(whole["logprobs"]["token_logprobs"], abs=1e-4)


# --- chat ------------------------------------------------------------------------------------------------------------

def test_the_log_probabilities_of_a_chat_are_those_of_transformers(served, truth):
    tokenizer, logprobs = truth
    answer = chat(served.url, "Hello?", seed=2, max_tokens=9, logprobs=True, top_logprobs=3, n=2, temperature=0.9)
    ids = tokenizer("<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    for index, choice in enumerate(answer.json()["choices"]):
        tokens = choice["logprobs"]["content"]
        data = b"".join(bytes(each["bytes"]) for each in tokens if not each["token"].startswith("<|"))
        assert data.decode(errors="replace") == content(answer, index)
        by_text = _ids_by_text(served)
        drawn = [by_text[each["token"]] for each in tokens]
        numbers = logprobs([*ids, *drawn])
        for place, each in enumerate(tokens, len(ids)):
            assert each["logprob"] == pytest.approx(float(numbers[place - 1, drawn[place - len(ids)]]), abs=1e-4)
            want = numbers[place - 1].sort(descending=True)
            assert [t["logprob"] for t in each["top_logprobs"]] == pytest.approx(want.values[:3].tolist(), abs=1e-4)
            assert [by_text[t["token"]] for t in each["top_logprobs"]] == want.indices[:3].tolist()


# --- refusals --------------------------------------------------------------------------------------------------------

BAD = [({}, "prompt must be"), ({"prompt": ""}, "empty"), ({"prompt": [[]]}, "prompt.0"),
       ({"prompt": [1, "a"]}, "prompt.0"), ({"prompt": [300]}, "not a token"),
       ({"prompt": ["a"] * 257}, "at most 256"), ({"prompt": ["a"] * 30}, "--max_queue"),
       ({"prompt": "long " * 300}, "tokens long"), ({"prompt": [60] * 256}, "may be 255"),
       ({"prompt": "a", "logprobs": 21}, "logprobs"), ({"prompt": "a", "suffix": "b"}, "suffix"),
       ({"prompt": "a", "best_of": 3}, "best_of"), ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
       ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias"), ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
       ({"prompt": "a", "stream": True, "logprobs": 1}, "in a stream"),
       ({"prompt": "a", "stream": True, "logprobs": 0, "echo": True}, "in a stream"),
       ({"prompt": "a", "stream": True, "logprobs": 0, "temperature": 0.5}, "not 0.5")]


@pytest.mark.parametrize(("body", "said"), BAD, ids=range(len(BAD)))
def test_a_bad_body_is_an_error_in_openais_shape(body, said, served):
    answer = httpx.post(f"{served.url}/v1/completions", content=json.dumps(body),
                        headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert said in error["message"] and "\n" not in error["message"] and len(error["message"]) < 300


def test_more_numbers_than_an_answer_may_hold_are_refused(served, monkeypatch):
    monkeypatch.setattr(served_model, "MAX_NUMBERS", 50)
    refused = complete(served, [60] * 30, max_tokens=0, echo=True, logprobs=1)
    assert refused.status_code == 400 and "60 log-probabilities, more than 50" in refused.json()["error"]["message"]
    assert complete(served, [60] * 30, max_tokens=0, echo=True, logprobs=0).status_code == 200


def test_a_base_model_completes_and_is_asked_for_no_chat(folder, tmp_path, truth):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with running({"base": str(tmp_path)}) as served:
        found = choices(complete(served, max_tokens=0, echo=True, logprobs=1))[0]["logprobs"]
        _check(found, tokenizer(PROMPT)["input_ids"], truth, 1)
        refused = chat(served.url)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == (
        "base has no chat template, so it cannot chat; send a prompt to /v1/completions")


# --- a tokenizer whose decoder drops the space that a text begins with, as SentencePiece's --------------------------

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)),
          "\u2581", *"Helowrd", "\u2581H", "\u2581w", "ll"]


def llama_like():
    """A tokenizer as Llama 2's: BOS before every text, a space before the first word, byte tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)},
                                   [("\u2581", "H"), ("\u2581", "w"), ("l", "l")], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def spaced(tmp_path_factory):
    """A model that says " w" behind "Hell"."""
    from transformers import AutoModelForCausalLM

    folder, tokenizer = save_tiny(tmp_path_factory.mktemp("model"), vocab_size=len(PIECES)), llama_like()
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        states = model.model(torch.tensor([tokenizer("Hell")["input_ids"]])).last_hidden_state[0, -1]
        model.lm_head.weight[PIECES.index("\u2581w")] = 10 * states
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with running({"a": folder}) as found:
        yield found


@pytest.mark.parametrize("settings", [dict(), dict(logprobs=1), dict(stop=["x"])], ids=str)
@pytest.mark.parametrize("prompt", ["Hell", [1, *map(PIECES.index, ("\u2581H", "e", "ll"))]], ids=["text", "tokens"])
def test_the_space_before_an_answers_first_word_is_part_of_it(spaced, prompt, settings):
    given = dict(prompt=prompt, max_tokens=1, temperature=0, **settings)
    before = "Hell" if prompt == "Hell" else "<s> Hell"  # tokens are shown as they are
    for has_echo in (False, True):
        [choice] = httpx.post(f"{spaced.url}/v1/completions", json={**given, "echo": has_echo}).json()["choices"]
        assert choice["text"] == (before + " w" if has_echo else " w")
        if "logprobs" in settings:
            assert choice["logprobs"]["text_offset"][-1] == len(before) * has_echo
            assert choice["logprobs"]["tokens"][-1] == " w"
    if "logprobs" not in settings:
        streamed = events(httpx.post(f"{spaced.url}/v1/completions", json={**given, "stream": True}))
        assert "".join(choice["text"] for event in streamed for choice in event["choices"]) == " w"


def test_a_stop_string_that_begins_with_that_space_ends_the_answer(spaced):
    [choice] = httpx.post(f"{spaced.url}/v1/completions",
                          json=dict(prompt="Hell", max_tokens=3, temperature=0, stop=" w")).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
