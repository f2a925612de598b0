"""A teacher with tokens of its own: the student's responses in its tokens, and the spans of text that both share.

Where a token of the student's and one of the teacher's end at the same character, a span ends. By the chain rule the
log-probability of a span is the sum over its tokens, for either side, however it cuts the text; so the two can be
compared (as in GOLD of TRL, which aligns tokens by the ends of their bytes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hybrid_rlhf.data.chat import Text, as_turn
from hybrid_rlhf.models.detokenizer import IncrementalDetokenizer
from hybrid_rlhf.models.tokenizer import Tokenizer, turn_ends
from hybrid_rlhf.rollout import Rollout


class Span(NamedTuple):
    """A piece of a response as places of the student's tokens and of the teacher's."""

    student: slice
    teacher: slice


@dataclass(frozen=True)
class OwnTokens:
    """The tokenizer of a teacher whose tokens are not the student's. raw: data.raw."""

    teacher: Tokenizer
    student: Tokenizer
    raw: bool = False

    def read(self, rollout: Rollout) -> tuple[Rollout, list[list[Span]]]:
        """The rollout with the same responses in the teacher's tokens, and the spans of each.

        An end of the response is a span: the student's last token, and what ends an answer of the teacher's. A
        character that the limit of tokens cut is in none, nor is anything of a text that the teacher's tokenizer
        changes. The teacher reads other bytes without a character as U+FFFD.
        """
        responses, spans = [], []
        for i, length in enumerate(rollout.response_mask.sum(1).tolist()):
            ids, has_eos = rollout.response_ids[i, :length].tolist(), bool(rollout.has_eos[i])
            prompt = rollout.prompts.given[i]
            before = rollout.prompts.ids[i] if isinstance(as_turn(self.student, prompt, self.raw), str) else ()
            text, ours = text_and_ends(self.student, ids[:length - has_eos], before)
            read_ids = self.teacher(text, add_special_tokens=False)["input_ids"]
            same, theirs = text_and_ends(self.teacher, read_ids)
            if same != text:  # SentencePiece has the space of a first token only behind others
                same, theirs = text_and_ends(self.teacher, read_ids, before=read_ids)
            end = self._end(prompt) if has_eos else None
            row = spans_of(ours, theirs)
            if end is not None:
                row.append(Span(slice(length - 1, length), slice(len(read_ids), len(read_ids) + 1)))
                read_ids = [*read_ids, end]
            responses.append(read_ids or [self.teacher.pad_token_id])  # of an empty response nothing is compared
            spans.append(row if same == text else [])
        read = Rollout.from_responses(rollout.prompts, responses, rollout.has_eos.tolist(), self.teacher.pad_token_id,
                                      rollout.completions, temperature=rollout.temperature)
        return replace(read, scores=rollout.scores, remarks=rollout.remarks), spans

    def _end(self, prompt: Text) -> int | None:
        """What ends the teacher's answer to the prompt."""
        ends = [] if isinstance(as_turn(self.teacher, prompt, self.raw), str) else turn_ends(self.teacher)
        return ends[0] if ends else self.teacher.eos_token_id


def text_and_ends(tokenizer: Tokenizer, ids: Sequence[int],
                  before: Sequence[int] = ()) -> tuple[str, list[int | None]]:
    """The text of `ids` behind the tokens `before`, and for each of `ids` the characters of this text until its end;
    None for one that completes no character. An incomplete character at the end is left out."""
    reader, pieces, ends = IncrementalDetokenizer(tokenizer, before), [], []
    length = 0
    for token in ids:
        piece = reader.push(token)
        length += len(piece)
        pieces.append(piece)
        ends.append(length if piece else None)
    return "".join(pieces), ends


def spans_of(student: Sequence[int | None], teacher: Sequence[int | None]) -> list[Span]:
    """The spans between ends (as `text_and_ends` counts them) that both have."""
    ours, theirs = ({end: i + 1 for i, end in enumerate(ends) if end is not None} for ends in (student, teacher))
    spans, begin = [], (0, 0)
    for end in sorted(ours.keys() & theirs.keys()):
        spans.append(Span(slice(begin[0], ours[end]), slice(begin[1], theirs[end])))
        begin = ours[end], theirs[end]
    return spans
