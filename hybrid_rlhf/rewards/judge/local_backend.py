"""A local judge: any chat model, sampled by our engine in inference mode."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_rlhf.algorithms.likelihood import chunk_rows, token_logprobs_and
from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.distributed import device
from hybrid_rlhf.core.memory import explained
from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right, predicted, summed_by_row
from hybrid_rlhf.data import chat as chats_as_text
from hybrid_rlhf.data.chat import Rendered, SkipRow
from hybrid_rlhf.data.row_images import sources_in
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.decode.admission import stop_ids
from hybrid_rlhf.kernels import ops_for
from hybrid_rlhf.models import load
from hybrid_rlhf.models.backbone import check_head, own_head, towers
from hybrid_rlhf.models.images import reader_of
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.quantize import quantized_layers
from hybrid_rlhf.models.tokenizer import Tokenizer, completion_text, load_tokenizer
from hybrid_rlhf.rewards.judge.asking import Arriving, Budget, Failure, key_of
from hybrid_rlhf.rewards.judge.judge_prompts import Chat, keyed
from hybrid_rlhf.roles.policy_module import PolicyModule
from hybrid_rlhf.roles.scoring import per_sequence, score

SPACES = ("", "Ġ", "▁")  # before a word in a vocabulary: none, a space in byte-level BPE, one in sentencepiece
MAX_TOKENS = 8192  # of a micro-batch of scoring


@dataclass
class LocalBackend:
    """Replies of the model at `path` (a folder or hub id), rendered by its own chat template, `batch_size` at once.

    A chat's samples depend on the chat and the seed alone, not on the rest of the batch. A chat that exceeds the
    model's positions is a Failure. No weights are read before `open`. A model with a processor of images reads those of
    chats.

    is_shared: the weights are those that the policy's adapter is on: `attach` gives them, and none are loaded.
    adapter: with is_shared, the folder of the adapter that the judge has on them (None: it is the base itself).
    """

    path: str
    budget: Budget
    dtype: str = "auto"
    load_in_4bit: bool = False
    temperature: float = 0.0
    batch_size: int = 16
    is_shared: bool = False
    adapter: str | None = None
    tokenizer: Any = field(default=None, init=False, repr=False)  # from `open` on, as the engine
    engine: Any = field(default=None, init=False, repr=False)
    reads_images: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self.name = self.path
        self._settings = ModelConfig(self.path, dtype=self.dtype, load_in_4bit=self.load_in_4bit)
        load.configuration(self._settings)  # UserError where there is no causal model
        check(not load.has_score(self.path), f"reward.judge.model: {self.path} is a sequence-classification model; "
                                             "give a chat model, or name it by reward.models")
        self.identity = ["local, words in all ways", self.path, fingerprint(self.path), self.dtype, self.load_in_4bit,
                         self.temperature, *([fingerprint(self.adapter)] if self.adapter else [])]

    def open(self) -> None:
        """Read tokenizer and weights, once. Does nothing where `attach` gives the weights."""
        if self.engine is not None or self.is_shared:
            return
        tokenizer = self._open_tokenizer()
        with explained(f"while loading the judge {self.path}"):
            model = load.load_causal_lm(self._settings, device())
        load.prepare(model, self._settings, len(tokenizer))
        check_head(model)
        self.attach(model.eval().requires_grad_(False))

    def attach(self, model: nn.Module, turn: Callable[[], AbstractContextManager] = nullcontext) -> None:
        """Judge by `model`, on which `turn` is the context that makes the judge's adapter, or none, the active one.
        UserError for a tokenizer without a chat template."""
        self.tokenizer = tokenizer = self._open_tokenizer()
        if self.is_shared:  # the policy's weights may be rounded otherwise than those of a load of its own
            packed = {type(layer.packed_weight).__name__ for layer in quantized_layers(model).values()}
            self.identity += [str(model.dtype), *sorted(packed)]
        self.reads_images = bool(towers(model)) and reader_of(tokenizer) is not None
        self.engine = HybridEngine(PolicyModule(model), model, eos_ids=stop_ids(model, tokenizer), name="judge",
                                   pad_id=tokenizer.pad_token_id, max_batch=self.batch_size, adapter=turn)

    def _open_tokenizer(self) -> Tokenizer:
        tokenizer = load_tokenizer(self.path)
        check(bool(tokenizer.chat_template), f"reward.judge.model: the tokenizer of {self.path} has no chat template; "
                                             "give a chat (instruct) model")
        return tokenizer

    def complete(self, chats: Sequence[Chat], max_new_tokens: int, seed: int) -> Arriving[str]:
        self.open()
        rows, failures = self._rows(chats, max_new_tokens)
        yield from failures
        if not rows:
            return
        sampling = SamplingConfig(max_new_tokens=max_new_tokens, temperature=self.temperature)
        numbers = [int(key_of(keyed(chats[i]))[:7], 16) for i in rows]  # of the draws: those of a chat in any batch
        with explained("while the judge writes"), self.engine.inference():
            samples = self.engine.generate(list(rows.values()), sampling, seed, numbers=numbers,
                                           images=[sources_in(chats[i]) for i in rows])
        texts = [completion_text(self.tokenizer, row, reason == "eos")
                 for row, reason in zip(samples.tokens, samples.finish_reasons, strict=True)]
        for i, ids, tokens, text in zip(rows, rows.values(), samples.tokens, texts, strict=True):
            self.budget.pay(len(ids), len(tokens))
            yield i, text

    def choose(self, chats: Sequence[Chat], words: Sequence[str]) -> Arriving[list[float]]:
        self.open()
        engine, tokenizer = self.engine, self.tokenizer
        fitting, failures = self._rows(chats, max(len(tokenizer(word)["input_ids"]) for word in words))
        yield from failures
        if not fitting:
            return
        asked = {i: [_before(tokenizer, chats[i], word) for word in words] for i in fitting}
        rows = [each for of_words in asked.values() for each in of_words]
        beside = other_tokens(tokenizer.get_vocab(), words, [ids[first:] for ids, first in rows[: len(words)]])
        mask = length_mask(torch.tensor([len(ids) for ids, _ in rows]))
        marks = pad_right([[k >= first for k in range(len(ids))] for ids, first in rows], False, torch.bool)
        images = [tuple(sources_in(chats[i])) for i, of_words in asked.items() for _ in of_words]
        batch = SequenceBatch(pad_right([ids for ids, _ in rows], engine.pad_id), mask, marks,
                              images=images if any(images) else None)
        with explained("while the judge scores"):
            logprobs, others = sums(engine, batch, MAX_TOKENS, [token for tokens in beside for token in tokens])
        probabilities = logprobs.double().exp().view(len(asked), len(words)).tolist()
        more = others[:: len(words)].double().exp().split(list(map(len, beside)), 1)  # a question's rows begin alike
        more = torch.stack([each.sum(1) for each in more], 1)  # (len(asked), len(words))
        for (i, of_words), values, written in zip(asked.items(), probabilities, more.tolist(), strict=True):
            exact = _apart(values, [ids for ids, _ in of_words])
            self.budget.pay(len(of_words[0][0]), 1)
            yield i, [value + others for value, others in zip(exact, written, strict=True)]

    def _rows(self, chats: Sequence[Chat], more: int) -> tuple[dict[int, list[int]], list[tuple[int, Failure]]]:
        """Token ids of the chats to ask, and the failures of the others."""
        limit, rows, failures = load.max_positions(self.engine.module.model), {}, []
        for i, chat in enumerate(chats):
            try:
                ids = chats_as_text.encode_prompt(self.tokenizer, chat)
            except SkipRow as error:
                if chat[-2:-1] and chat[-2]["role"] == "assistant":  # its own reply, unlike in the next question
                    failures.append((i, Failure(f"its reply cannot be shown to it again: {error}")))
                    continue
                raise UserError(f"reward.judge.model {self.path} cannot read the question: {error}; give a model whose "
                                "chat template shows it, or reward.judge.template with no [system] part") from error
            if limit is not None and len(ids) + more > limit:
                failures.append((i, Failure(f"a question of {len(ids)} tokens and a reply of {more} are more than the "
                                            f"judge's {limit} positions")))
                continue
            with self.budget.call() as spent:
                if spent is not None:
                    failures.append((i, spent))
                    continue
            rows[i] = ids
        return rows, failures


def _before(tokenizer: Tokenizer, chat: Chat, word: str) -> tuple[list[int], int]:
    """Token ids of the chat and `word` as the beginning of the reply, and how many of them come before the word,
    including an empty thought that the template puts before every reply."""
    rendered = chats_as_text.compose(tokenizer, chat, word)
    start = rendered.text.index(word, rendered.spans[-1][0])
    cut = Rendered(rendered.text[: start + len(word)], [(start, start + len(word))], False)
    encoded = chats_as_text.encode_all(tokenizer, [cut])[0]  # with an end token
    return encoded.ids[:-1], encoded.num_prompt_tokens


def _apart(probabilities: list[float], rows: list[list[int]]) -> list[float]:
    """The probability of each word without that of longer words whose tokens begin with its own: 1 0 is not 1."""
    return [max(0.0, probability - sum(p for p, other in zip(probabilities, rows, strict=True)
                                       if len(other) > len(ids) and other[: len(ids)] == ids))
            for probability, ids in zip(probabilities, rows, strict=True)]


def fingerprint(path: str) -> str:
    """A hash that changes when a later run writes another model to the folder; a hub id is its own."""
    folder = Path(path)
    if not folder.is_dir():
        return path
    files = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".json", ".jinja", ".bin"))
    return hashlib.sha256(repr([(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]).encode()).hexdigest()


# -- the probabilities of a reply's first words ------------------------------------------------------------------------


def other_tokens(vocab: Mapping[str, int], words: Sequence[str], scored: Sequence[list[int]]) -> list[list[int]]:
    """For each word the other single tokens that spell it, beside the tokens by which it is scored: behind a space, and
    in lower and upper case (Yes, yes, YES; but a is not A).

    A spelling counts if every word has a token for it, so that no word has more of them than another, and if none of
    these tokens begins or is another word.
    """
    ways = [[vocab[space + text] for text in texts] for texts in _written(words) for space in SPACES
            if all(space + text in vocab for text in texts)]
    places = range(len(words))
    foreign = [{ids[j] for ids in ways for j in places if j != k} | {scored[j][0] for j in places if j != k}
               for k in places]
    ways = [ids for ids in ways if not any(ids[k] in foreign[k] for k in places)]
    return [list(dict.fromkeys(ids[k] for ids in ways if [ids[k]] != scored[k])) for k in places]


def _written(words: Sequence[str]) -> Iterator[Sequence[str]]:
    """The words as they are, and in lower and upper case if each has several letters."""
    yield words
    if all(len(word) > 1 for word in words):
        yield from ([change(word) for word in words] for change in (str.lower, str.upper))


@torch.no_grad()
def sums(engine: HybridEngine, batch: SequenceBatch, max_tokens: int, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(B,) fp32 on the CPU: the summed log-probabilities of each row's loss tokens; (B, len(tokens)): those of `tokens`
    at the position of its first loss token."""
    if not tokens:
        return per_sequence(engine, batch, max_tokens), torch.zeros(len(batch), 0)
    summed, others = torch.zeros(len(batch)), torch.zeros(len(batch), len(tokens))
    for index, (of_rows, of_tokens) in score(engine, batch, max_tokens, _asking(engine, tokens)):
        summed[index], others[index] = of_rows.cpu(), of_tokens.cpu()
    return summed, others


def _asking(engine: HybridEngine, tokens: Sequence[int]) -> Callable[[SequenceBatch], tuple[Tensor, Tensor]]:
    module: Any = engine.module  # a PolicyModule
    size = module.model.config.get_text_config().vocab_size
    ids = torch.tensor(tokens, device=engine.device)

    def measure(logits: Tensor) -> tuple[Tensor]:
        return (logits.float().log_softmax(-1)[:, ids],)

    def ask(rows: SequenceBatch) -> tuple[Tensor, Tensor]:
        hidden = module.states(rows).rows
        (logprobs, *_), (of_tokens,) = token_logprobs_and(
            measure, (), hidden, predicted(rows), own_head(module.model), chunk_size=chunk_rows(size, hidden.dtype),
            score_logits=ops_for(hidden.device.type).token_scores)
        counts = rows.loss_mask[:, 1:].sum(1)
        return summed_by_row(logprobs, rows), of_tokens[counts.cumsum(0) - counts]

    return ask
