"""A judge behind our own server says what the same model says where it is loaded."""

from __future__ import annotations

import pytest

from hybrid_rlhf.rewards.judge.api_backend import ApiBackend
from hybrid_rlhf.rewards.judge.asking import Budget, Failure
from hybrid_rlhf.rewards.judge.local_backend import LocalBackend
from tests.factories.judges import in_order
from tests.factories.tiny import chatml_tokenizer, save_tiny
from tests.inference.server.tiny_server import running

CHATS = [[{"role": "system", "content": "judge"}, {"role": "user", "content": text}]
         for text in ("say cat", "the moon is red", "a", "once upon a time", "fox", "You are welcome!")]


def test_replies_by_address_are_those_of_the_model_itself(tmp_path):
    folder = save_tiny(tmp_path / "judge", seed=3, initializer_range=0.3)
    budget = Budget()
    with running({"judge": folder}) as server:
        backend = ApiBackend(f"{server.url}/v1", "judge", budget, concurrency=3, retries=1, timeout=60.0)
        by_address = in_order(backend.complete(CHATS, 12, 0))
        nobody = in_order(ApiBackend(f"{server.url}/v1", "nobody", Budget(), retries=0).complete(CHATS[:1], 12, 0))
        long = in_order(backend.complete([[{"role": "user", "content": "fox " * 500}]], 12, 0))
    own = LocalBackend(folder, Budget(), dtype="float32")
    assert by_address == in_order(own.complete(CHATS, 12, 0))
    assert isinstance(nobody[0], Failure) and nobody[0].is_fatal and "404" in nobody[0].what
    assert isinstance(long[0], Failure) and not long[0].is_fatal and "400" in long[0].what
    assert (budget.calls, budget.num_input) == (7, own.budget.num_input)


def test_probabilities_by_address_are_those_of_the_model_itself(tmp_path):
    """Of words that are one token each and among the twenty likeliest, for an address tells no others."""
    folder = save_tiny(tmp_path / "judge", seed=3, initializer_range=0.3)
    own, tokenizer = LocalBackend(folder, Budget(), dtype="float32"), chatml_tokenizer()
    texts = {tokenizer.decode([i]) for i in range(4, len(tokenizer))}
    singles = sorted(t for t in texts if t.isascii() and t.isalnum() and len(tokenizer(t).input_ids) == 1)
    with running({"judge": folder}) as server:
        backend = ApiBackend(f"{server.url}/v1", "judge", Budget(), retries=1, timeout=60.0)
        for chat in CHATS[:3]:
            chances = in_order(own.choose([chat], singles))[0]
            words = sorted(singles, key=dict(zip(singles, chances, strict=True)).get)[-2:]
            by_address, here = in_order(backend.choose([chat], words))[0], in_order(own.choose([chat], words))[0]
            told = [(a, b) for a, b in zip(by_address, here, strict=True) if a > 0]
            assert told, words
            assert all(a == pytest.approx(b, rel=1e-3) for a, b in told)
