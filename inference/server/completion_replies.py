"""How completions go out: prompts as they are, gone on from or scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi.responses import JSONResponse
from starlette.types import Send

from hybrid_rlhf.data.chat import Rendered, encode_all
from hybrid_rlhf.inference.detokenizer import IncrementalDetokenizer
from hybrid_rlhf.inference.sequence_scores import ScoredToken
from hybrid_rlhf.inference.server.answer_shapes import CompletionShapes, completion_choice, completion_logprobs, event
from hybrid_rlhf.inference.server.completion_protocol import CompletionRequest
from hybrid_rlhf.inference.server.protocol import ApiError
from hybrid_rlhf.inference.server.replies import Asking, Choice, Piece, choices_of, drawn, stream_events
from hybrid_rlhf.inference.server.served_model import Limits, Served, check_length

MAX_NUMBERS = 2**20  # log-probabilities of echoed prompts in one answer: some 30 MB of JSON


@dataclass(frozen=True)
class GivenPrompt:
    """A prompt as tokens, and as the text of an echo. has_bos: the first is the tokenizer's own and has no text."""

    ids: list[int]
    text: str
    has_bos: bool = False

    def offsets(self, tokenizer) -> list[int]:  # noqa: ANN001 - a transformers class
        """Where in the text each token begins; where the tokenizer changes what it reads, as near as can be told."""
        detokenizer, found, length = IncrementalDetokenizer(tokenizer), [], 0
        for token in self.ids:
            found.append(min(length, len(self.text)))
            if not (self.has_bos and len(found) == 1):
                length += len(detokenizer.push(token))
        return found


def given_prompts(model: Served, asked: CompletionRequest, limits: Limits) -> list[GivenPrompt]:
    """The prompts of a request, in the thread for prompts; ApiError for what is too long or is no token."""
    prompts = [_given(model, given, limits, asked.adds_special) for given in asked.prompts]
    count = sum(len(prompt.ids) for prompt in prompts) * asked.num_choices * ((asked.num_top or 0) + 1)
    if asked.num_top is not None and asked.has_echo and count > MAX_NUMBERS:
        raise ApiError(400, f"these prompts ask for {count} log-probabilities, more than {MAX_NUMBERS} at once; "
                            "send fewer prompts or a smaller logprobs", param="prompt")
    return prompts


def _given(model: Served, given: str | list[int], limits: Limits, adds_special: bool) -> GivenPrompt:
    if not isinstance(given, str):
        check_length(model, limits, "a prompt is", len(given), param="prompt")
        if wrong := [each for each in given if not 0 <= each < model.num_rows]:
            raise ApiError(400, f"{str(wrong[0])[:40]} is no token of {model.name}; ids lie in "
                                f"[0, {model.num_rows - 1}]", param="prompt")
        return GivenPrompt(given, model.encoder.decode(given, clean_up_tokenization_spaces=False))
    rendered = Rendered(given, [], True)
    check_length(model, limits, "a prompt is", model.least_tokens.of(rendered), "or more ", param="prompt")
    ids = (encode_all(model.encoder, [rendered])[0].ids if adds_special else
           model.encoder(given, add_special_tokens=False)["input_ids"])
    bos = model.encoder.bos_token
    check_length(model, limits, "a prompt is", len(ids), param="prompt")
    if not ids:
        raise ApiError(400, "a prompt is empty, and no BOS is put before it; send some text",
                       param="prompt")
    return GivenPrompt(ids, given, bool(bos) and ids[0] == model.encoder.bos_token_id and not given.startswith(bos))


Scored = list[ScoredToken | int]  # the first token of an echo has no score


async def whole_completion(send: Send, asking: Asking, prompts: Sequence[GivenPrompt]) -> None:
    """All choices, prompt by prompt."""
    num_choices = asking.asked.num_choices
    counts = [0] * len(prompts) * num_choices
    if asking.asked.is_read_only:
        answers = [each for prompt in prompts for each in [await _read(asking, prompt)] * num_choices]
        counts = [len(choice.tokens) for choice, _ in answers]
    else:
        answers = [(choice, await _scored(asking, prompts[index // num_choices], choice))
                   for index, choice in enumerate(await choices_of(asking, counts))]

    def shown() -> list[dict]:
        return [_shown(asking, index, prompts[index // num_choices], *answer) for index, answer in enumerate(answers)]

    used = (sum(len(prompt.ids) for prompt in prompts), sum(counts))
    found = CompletionShapes(asking.model.name).of(await asking.encode(shown), used)
    await JSONResponse(found)({"type": "http"}, None, send)


async def _read(asking: Asking, prompt: GivenPrompt) -> tuple[Choice, Scored]:
    """An answer of no token, or of the likeliest alone, with the scores that it was found by."""
    if asking.asked.limit == 0:
        choice = Choice(reason="length")
        return choice, await _scored(asking, prompt, choice)
    scored = await asking.scores(prompt.ids, 1, with_next=True)
    token, text = scored[-1].token, asking.text(prompt.ids)
    piece = text.push([token], is_last=True)
    if token in asking.ends:
        return Choice(piece, "stop", (), (), [0], [token]), [prompt.ids[0], *scored]
    num_said = text.num_said(is_over=True)
    choice = Choice(piece, "stop" if text.has_stopped else "length", (), [token][:num_said], text.offsets[:num_said])
    return choice, [prompt.ids[0], *scored[: len(scored) - 1 + len(choice.tokens)]]


async def _scored(asking: Asking, prompt: GivenPrompt, choice: Choice) -> Scored:
    """The tokens of a choice as it goes out, prompt and end included; none where no log-probabilities are asked for."""
    ids = [*prompt.ids, *choice.tokens, *choice.ending]
    if asking.asked.num_top is None:
        return []
    if asking.asked.has_echo:
        return [ids[0], *await asking.scores(ids, 1)]
    return [*await asking.scores(ids, len(prompt.ids))]


def _shown(asking: Asking, index: int, prompt: GivenPrompt, choice: Choice, scored: Scored) -> dict:
    before = prompt.text if asking.asked.has_echo else ""
    logprobs = None
    if asking.asked.num_top is not None:
        offsets = prompt.offsets(asking.model.encoder) if asking.asked.has_echo else []
        offsets += [len(before) + each for each in choice.offsets]
        logprobs = completion_logprobs(asking.model.token_text, scored, offsets)
    return completion_choice(index, before + choice.text, choice.reason, logprobs)


async def stream_completion(send: Send, asking: Asking, prompts: Sequence[GivenPrompt]) -> None:
    """Pieces of the choices as they are drawn, each behind its prompt where that is echoed."""
    asked, shapes, texts = asking.asked, CompletionShapes(asking.model.name), asking.model.token_text
    counts = [0] * len(asking.job.requests)

    def chunk(index: int, text: str, reason: str | None, logprobs: dict | None = None) -> bytes:
        return event(shapes.of([completion_choice(index, text, reason, logprobs)]))

    def shown(piece: Piece) -> bytes:
        logprobs = None
        if asked.num_top is not None:
            logprobs = completion_logprobs(texts, drawn(asking, piece, with_ending=True), piece.offsets)
        return chunk(piece.index, piece.text, piece.reason, logprobs) if piece.text or piece.reason else b""

    begin = [chunk(i, prompts[i // asked.num_choices].text, None) for i in range(len(counts))] if asked.has_echo else []
    used = sum(len(prompt.ids) for prompt in prompts)
    await stream_events(send, asking, counts, b"".join(begin), shown, lambda: shapes.of([], (used, sum(counts))))
