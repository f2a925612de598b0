"""The text of a completion by a SentencePiece-like tokenizer, whose decoder drops the space that a text begins with."""

from __future__ import annotations

import httpx
import pytest
import torch

from tests.factories.tiny import save_tiny
from tests.inference.server.tiny_server import events, running

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
def served(tmp_path_factory):
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


@pytest.mark.parametrize("settings", [dict(), dict(logprobs=1), dict(stop=["x"]), dict(min_tokens=1)], ids=str)
@pytest.mark.parametrize("prompt", ["Hell", [1, *map(PIECES.index, ("\u2581H", "e", "ll"))]], ids=["text", "tokens"])
def test_the_space_before_an_answers_first_word_is_part_of_it(served, prompt, settings):
    given = dict(prompt=prompt, max_tokens=1, temperature=0, **settings)
    before = "Hell" if prompt == "Hell" else "<s> Hell"  # tokens are shown as they are
    for has_echo in (False, True):
        [choice] = httpx.post(f"{served.url}/v1/completions", json={**given, "echo": has_echo}).json()["choices"]
        assert choice["text"] == (before + " w" if has_echo else " w")
        if "logprobs" in settings:
            assert choice["logprobs"]["text_offset"][-1] == len(before) * has_echo
            assert choice["logprobs"]["tokens"][-1] == " w"
    if "logprobs" not in settings:
        streamed = events(httpx.post(f"{served.url}/v1/completions", json={**given, "stream": True}))
        assert "".join(choice["text"] for event in streamed for choice in event["choices"]) == " w"


def test_a_stop_string_that_begins_with_that_space_ends_the_answer(served):
    [choice] = httpx.post(f"{served.url}/v1/completions",
                          json=dict(prompt="Hell", max_tokens=3, temperature=0, stop=" w")).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
