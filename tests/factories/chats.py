"""Conversations with a scripted engine, and the greedy answer of plain transformers."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.inference.conversation import Conversation
from hybrid_rlhf.inference.teaching import Mark
from tests.factories.tiny import tiny_tokenizer

TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def u(content: object) -> dict:
    return {"role": "user", "content": content}


def a(content: str, **more: object) -> dict:
    return {"role": "assistant", "content": content, **more}


def tokenizer_with_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class ScriptedEngine:
    """Answers with what it was told to, token by token, and remembers what it was asked."""

    def __init__(self, *answers: str, interrupt_after: int | None = None, tokenizer=None) -> None:
        self.tokenizer = tokenizer or tokenizer_with_template()
        self.answers, self.interrupt_after = list(answers), interrupt_after
        self.eos_ids = [self.tokenizer.eos_token_id]
        self.prompts, self.seeds, self.limits, self.inside, self.closed = [], [], [], False, 0

    @contextmanager
    def inference(self):
        self.inside = True
        try:
            yield self
        finally:
            self.inside = False

    def stream(self, prompt, sampling, seed, images=()):
        assert self.inside
        self.prompts.append(self.tokenizer.decode(prompt))
        self.seeds.append(seed)
        self.limits.append(sampling.max_new_tokens)
        try:
            ids = self.tokenizer(self.answers.pop(0), add_special_tokens=False)["input_ids"]
            for i, token in enumerate(ids[: sampling.max_new_tokens]):
                if i == self.interrupt_after:
                    raise KeyboardInterrupt
                yield token
        finally:
            self.closed += 1


def conversation(*answers: str, interrupt_after: int | None = None, tokenizer=None, **changes) -> Conversation:
    engine = ScriptedEngine(*answers, interrupt_after=interrupt_after, tokenizer=tokenizer)
    return Conversation(engine, engine.tokenizer, SamplingConfig(max_new_tokens=64), **changes)


class Noting:
    """A learner that notes its marks."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.last = ""

    def learn(self, mark: Mark) -> Noting:
        self.marks.append(mark)
        self.last = f"learnt {len(self.marks)}"
        return self

    def line(self) -> str:
        return self.last

    def undo(self) -> Mark:
        return self.marks.pop()

    def save(self) -> Path:
        return Path("out/model")


def greedy_by_transformers(folder: Path, prompt: str, num_tokens: int) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")["input_ids"]
    out = model.generate(ids, do_sample=False, max_new_tokens=num_tokens)
    return without_end(tokenizer, out[0, ids.shape[1]:].tolist())


def without_end(tokenizer, ids: list[int]) -> str:
    """What people read of a response that transformers generated: without EOS and padding behind it."""
    while ids and ids[-1] in (tokenizer.eos_token_id, tokenizer.pad_token_id):
        ids = ids[:-1]
    return tokenizer.decode(ids)
