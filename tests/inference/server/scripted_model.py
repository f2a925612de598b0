"""A served model that says what it was told to, token by token, and remembers what it was asked."""

from __future__ import annotations

from contextlib import contextmanager

from hybrid_rlhf.engine.decode.admission import stop_ids
from hybrid_rlhf.inference.server.served_model import Served
from hybrid_rlhf.inference.server.worker import ModelQueue
from tests.factories.tiny import tiny_causal_lm
from tests.factories.trl_templates import tokenizer_of


class NoModel:
    generation_config = None


class Script:
    """An engine and what it serves. answers: what is said next, then nothing but the last of them."""

    num_slots = 4

    def __init__(self, tokenizer) -> None:
        self.model = tiny_causal_lm()  # is asked for the size of its vocabulary alone
        self.tokenizer, self.stops = tokenizer, frozenset(stop_ids(NoModel, tokenizer))
        self.answers: list[str] = []
        self.prompts: list[str] = []
        self._open: list[tuple] = []

    @contextmanager
    def inference(self):
        yield self

    def serve(self, _num_slots, _capacity):
        return self

    def check(self, _request) -> None:
        pass

    def submit(self, request) -> None:
        self.prompts.append(self.tokenizer.decode(request.prompt))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self._open.append((request, iter(self.tokenizer(answer, add_special_tokens=False)["input_ids"])))

    def drop(self, request) -> None:
        self._open = [each for each in self._open if each[0] is not request]

    def step(self) -> bool:
        for request, tokens in self._open:
            if len(request.tokens) < request.limit and (token := next(tokens, None)) is not None:
                request.tokens.append(token)
        return bool(self._open)


def scripted(name: str, template: str, capacity: int = 4000) -> Served:
    """A model called `name` with the chat template that TRL ships under that name."""
    tokenizer = tokenizer_of(template)
    return Served(name, ModelQueue(Script(tokenizer), 4, capacity), tokenizer)
