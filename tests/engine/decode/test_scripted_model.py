"""The model that says what a test wrote down does so by each path of the engine, whoever shares its batch."""

from collections import Counter

import pytest
import torch

from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.decode.runner import Runner
from tests.factories.scripted import conversation, scripted_causal_lm
from tests.factories.tiny import tiny_tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": %d}}\n</tool_call><|im_end|>'


def sums(*pairs: tuple[int, int]) -> list[list[list[int]]]:
    return [conversation(tiny_tokenizer(), f"<|im_start|>user\n{a} + {b}?<|im_end|>\n<|im_start|>assistant\n",
                         CALL % (a, b),
                         f"\n<|im_start|>user\n<tool_response>\n{a + b}\n</tool_response><|im_end|>\n"
                         "<|im_start|>assistant\n", f"It is {a + b}.<|im_end|>") for a, b in pairs]


@pytest.mark.parametrize("path", ["native", "eager", "generate"])
def test_each_turn_is_said_as_written_by_every_path(path, monkeypatch):
    if path != "native":
        refused = {"native"} if path == "eager" else {"native", "eager"}
        tried = Runner._try
        monkeypatch.setattr(Runner, "_try", lambda runner, way: "refused by the test" if way in refused
                            else tried(runner, way))
    written = sums((2, 3), (12, 7), (2, 7), (4, 4))
    engine = HybridEngine(model := scripted_causal_lm(written), model, eos_ids=[3])
    first = [given for given, *_ in written]
    second = [given + said + answer for given, said, answer, _ in written]
    with engine.inference():
        drawn = engine.generate(first + second, SamplingConfig(max_new_tokens=100), seed=1)
    assert engine.describe()["path"] == path
    assert drawn.tokens == [said for _, said, *_ in written] + [said for *_, said in written]


def test_where_two_conversations_part_both_ways_are_as_likely():
    tokenizer = tiny_tokenizer()
    written = [conversation(tokenizer, "p", said) for said in ("yes<|im_end|>", "no<|im_end|>")]
    model = scripted_causal_lm(written)
    with torch.no_grad():
        chances = model(torch.tensor([written[0][0]])).logits[0, -1].softmax(-1)
    ways = [said[0] for _, said in written]
    torch.testing.assert_close(chances[ways], torch.tensor([0.5, 0.5]), rtol=1e-4, atol=0)
    engine = HybridEngine(model, model, eos_ids=[3])
    with engine.inference():
        drawn = engine.generate([written[0][0]] * 40, SamplingConfig(max_new_tokens=9), seed=0).tokens
    said = Counter(map(tuple, drawn))
    assert set(said) == {tuple(said) for _, said in written} and min(said.values()) > 8
