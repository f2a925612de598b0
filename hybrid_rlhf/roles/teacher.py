"""The teacher: the policy that distillation moves the actor towards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.divergence import Divergence, TeacherTargets
from hybrid_rlhf.algorithms.likelihood import chunk_rows, token_logprobs
from hybrid_rlhf.core.errors import UserError, check, present
from hybrid_rlhf.core.tensors import SequenceBatch, predicted
from hybrid_rlhf.data.chat import Text, as_turn, encode_prompt
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.engine.train.deepspeed_compat import is_partitioned
from hybrid_rlhf.kernels import ops_for
from hybrid_rlhf.models.backbone import causal_part, own_head, text_backbone
from hybrid_rlhf.models.load import max_positions
from hybrid_rlhf.models.tokenizer import Tokenizer
from hybrid_rlhf.roles.policy_module import PolicyModule
from hybrid_rlhf.roles.scoring import per_action, score
from hybrid_rlhf.roles.spans import OwnTokens
from hybrid_rlhf.rollout import Rollout

SELF = "self"  # in the place of a teacher's model: that which the student starts from
WHOLE_HEAD = ("roles.teacher: its weights are cut into parts (ZeRO 3), and a divergence over the whole vocabulary "
              "needs its whole head; give distill.top_k (such as 64), or roles.teacher.zero_stage 0")


_OURS = ("prompt", "response", "score", "feedback", "best", "best_score")  # of a template, beside the row's columns


@dataclass(frozen=True)
class TeacherPrompt:
    """What a teacher reads in the place of the last user message, and the student does not: the answer, a hint, or what
    came of the response (on-policy self-distillation: OPSD, arXiv 2601.18734; SDFT, 2601.19897; SDPO, 2601.20802).

    template: jinja over the row's columns and: prompt (the message), response, score (None: it has none), feedback (the
    judge's remark), best and best_score (another response to the same prompt, that of the highest score; best is empty
    and best_score None where no other has one); None: the message itself, in the tokens of a teacher that has its own.
    raw: data.raw.
    """

    template: str | None
    tokenizer: Tokenizer
    raw: bool = False

    def columns(self) -> set[str]:
        """The columns of the data that the template reads."""
        return self.names() - set(_OURS)

    def names(self) -> set[str]:
        """All that the template reads."""
        from jinja2 import TemplateSyntaxError, meta

        if self.template is None:
            return set()
        try:
            return meta.find_undeclared_variables(_sandbox().parse(self.template))
        except TemplateSyntaxError as error:
            raise UserError(f"{_TEMPLATE} line {error.lineno}: {error.message}; fix the template") from error

    def check(self, rows: Sequence[dict], num_new: int, limit: int | None) -> None:
        """UserError for rows of the data (prompt or text, images, columns) that show images and, where the template
        reads nothing of the response, for one that it cannot be rendered for and for a longest text that exceeds
        `limit` positions with num_new tokens behind it: before a step asks for it."""
        self.refuse_images(row.get("images") for row in rows)
        if not self._reads_response():
            longest = max((self._asked(row.get("prompt") or row["text"], row) for row in rows), key=_size)
            self.check_positions(len(self._encoded(longest)) + num_new, limit)

    def known(self, row: dict) -> list[int] | None:
        """What the teacher reads of a row of the data, in ids; None if that needs the response, not there yet."""
        return None if self._reads_response() else self._encoded(self._asked(row.get("prompt") or row["text"], row))

    def _reads_response(self) -> bool:
        return bool(self.names() & ({*_OURS} - {"prompt"}))

    @property
    def _option(self) -> str:
        return "roles.teacher" if self.template is None else _TEMPLATE

    def refuse_images(self, images: Iterable) -> None:
        """UserError if any prompt has images."""
        check(not any(images), f"{self._option}: a prompt has images, which the teacher's does not show; leave such "
                               "rows out")

    def check_positions(self, length: int, limit: int | None) -> None:
        """UserError if the teacher has fewer positions than a prompt and a response take."""
        check(limit is None or length <= limit, f"{self._option}: a prompt of the teacher's and a response are "
                                                f"{length} tokens, more than its {limit} positions; say less")

    def of(self, rollout: Rollout) -> Rollout:
        """The rollout with the teacher's prompts before the same responses, so that its actions stay where they are."""
        prompts, others = rollout.prompts, _best_others(rollout)
        asked = prompts.columns.get("prompt") or prompts.texts
        ids = []
        for i, text in enumerate(asked):
            best = others[i]
            values = {name: column[i] for name, column in prompts.columns.items()} | {
                "response": rollout.completions[i], "score": _score_of(rollout, i),
                "feedback": rollout.remarks[i] if rollout.remarks else "",
                "best": "" if best is None else rollout.completions[best],
                "best_score": None if best is None else _score_of(rollout, best)}
            ids.append(self._encoded(self._asked(text, values)))
        return replace(rollout, prompts=replace(prompts, ids=ids))

    def _encoded(self, prompt: Text) -> list[int]:
        return encode_prompt(self.tokenizer, as_turn(self.tokenizer, prompt, self.raw))

    def _asked(self, prompt: Text, values: dict[str, Any]) -> Text:
        if self.template is None:
            return prompt
        if isinstance(prompt, str):
            return self._rendered(values | {"prompt": prompt})
        last = max((i for i, message in enumerate(prompt) if message["role"] == "user"), default=-1)
        check(last >= 0, f"{_TEMPLATE}: a prompt has no user message, whose place it takes")
        content = self._rendered(values | {"prompt": prompt[last]["content"]})
        return [*prompt[:last], {**prompt[last], "content": content}, *prompt[last + 1:]]

    def _rendered(self, values: dict[str, Any]) -> str:
        from jinja2 import TemplateError

        try:
            return _compiled(present(self.template, "template")).render(values)
        except (TemplateError, TypeError, ArithmeticError) as error:
            raise UserError(f"{_TEMPLATE}: {' '.join(str(error).split())[:200]}; fix the template") from error


_TEMPLATE = "distill.teacher_prompt"


def _size(prompt: Text) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(str(message["content"])) for message in prompt)


def _sandbox() -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined)


@lru_cache(maxsize=4)
def _compiled(template: str) -> Any:
    return _sandbox().from_string(template)


def _score_of(rollout: Rollout, i: int) -> float | None:
    return None if rollout.scores is None or rollout.scores[i].isnan() else float(rollout.scores[i])


def _best_others(rollout: Rollout) -> list[int | None]:
    """For each response the place of the best other one to its prompt (the first of equals), where one has a score."""
    groups: dict[tuple, list[int]] = {}
    for i, ids in enumerate(rollout.prompts.ids):
        groups.setdefault(tuple(ids), []).append(i)
    scores = {i: score for i in range(len(rollout)) if (score := _score_of(rollout, i)) is not None}
    others = ([j for j in groups[tuple(ids)] if j != i and j in scores] for i, ids in enumerate(rollout.prompts.ids))
    return [max(each, key=scores.__getitem__, default=None) for each in others]


@dataclass
class Teacher:
    """The policy that the actor learns from. It is evaluated before the update, and never trained.

    prompt: what it reads in the place of the student's prompts (None: the same). own_tokens: its tokenizer, where its
    tokens are not the student's (None: they are); it has a prompt then, and only `log_ratios` can be asked of it.

    The logits of a whole batch are never stored: the hidden state of each loss token is, and the actor's update applies
    the teacher's head to a chunk of them at a time. So the head's weights have to stay on the device.
    """

    engine: HybridEngine[PolicyModule]
    max_tokens: int = 8192
    prompt: TeacherPrompt | None = None
    own_tokens: OwnTokens | None = None

    def __post_init__(self) -> None:
        if self.engine.training is None:  # else it is the actor's own, under the average of its weights
            self.engine.name = "teacher"

    def reads(self, rollout: Rollout) -> Rollout:
        """The rollout as the teacher reads it: the same responses, behind its own prompts. UserError where they exceed
        its positions, and for a prompt with images."""
        if self.prompt is None:
            return rollout
        self.prompt.refuse_images(rollout.prompts.images)
        rollout = self.prompt.of(rollout)
        longest = max(map(len, rollout.prompts.ids), default=0) + rollout.response_mask.shape[1]
        self.prompt.check_positions(longest, max_positions(self._model))
        return rollout

    @property
    def _model(self) -> Any:  # of transformers
        return self.engine.module.model

    def check(self, top_k: int) -> None:
        """UserError if the actor's update cannot apply the teacher's head: it is sharded, or has an adapter, which is
        active only while the teacher runs. With top_k > 0 the head is not needed; then UserError for more tokens than
        its vocabulary has."""
        check_top_k(top_k, self._model.config.get_text_config().vocab_size)
        head = self._model.get_output_embeddings()
        check(top_k > 0 or not is_partitioned(self.engine.module), WHOLE_HEAD)
        has_rows = hasattr(getattr(head, "base_layer", head), "rows_beside")  # of added tokens; of a tied head too
        check(top_k > 0 or not (hasattr(head, "lora_A") or has_rows),
              "roles.teacher: an adapter is on the output head of its base (such as the rows of added tokens), which "
              "the student's update reads without the teacher's; give the merged model (the folder model of its run), "
              "or distill.top_k (such as 64)")

    def targets(self, batch: SequenceBatch, kind: Divergence, top_k: int = 0) -> TeacherTargets:
        """Targets for the loss tokens of `batch`, on the CPU, without gradients; with top_k > 0 the likeliest tokens
        instead of hidden states. UserError for tokens outside its vocabulary, and for sharded weights without top_k."""
        return self.read(batch, kind, top_k, temperature=None)[0]

    @torch.no_grad()
    def read(self, batch: SequenceBatch, kind: Divergence, top_k: int = 0,
             temperature: float | None = 1.0) -> tuple[TeacherTargets, list[Tensor]]:
        """`targets`, and for each row the log-probabilities (n,) fp32 of its loss tokens, from the logits over
        `temperature` (the divergence has its own); None: they are not computed, and 0."""
        module = self.engine.module
        self.check(top_k)
        self._check_tokens(batch)
        ask = _likeliest(self.engine, kind, top_k, temperature or 1.0) if top_k else _hidden(module, temperature)
        counts = batch.loss_mask[:, 1:].sum(1)
        results: list[tuple[Tensor, ...]] = [()] * len(batch)  # row -> (rows[, ids], logprobs)
        for index, parts in score(self.engine, batch, self.max_tokens, ask):
            sizes = counts[index].tolist()
            for row, *split in zip(index.tolist(), *(part.cpu().split(sizes) for part in parts), strict=True):
                results[row] = tuple(split)
        columns = [list(column) for column in zip(*results, strict=True)] or [[], [], []]
        targets = (TeacherTargets(kind, columns[0], ids=columns[1]) if top_k else
                   TeacherTargets(kind, columns[0], head=own_head(module.model)))
        return targets, columns[-1]

    @torch.no_grad()
    def log_ratios(self, rollout: Rollout) -> tuple[Tensor, Tensor, int]:
        """log(teacher / student) of the sampled tokens, at the rollout's temperature, (B, R) fp32 twice: at each action
        that of its span, and once for each span, at its last action; and the number of actions that are in no span.

        A span is a token or, where the teacher has tokens of its own, the least piece of text that ends with a token of
        both (roles/spans.py). Where the rollout has candidate tokens, both are normalised over them.
        """
        if self.own_tokens is None:
            ratios = (self.logprobs(rollout) - rollout.logprobs).masked_fill(~rollout.action_mask, 0)
            return ratios, ratios, 0
        read, spans = self.own_tokens.read(rollout)
        theirs = self.logprobs(read)
        at_each, at_ends = (torch.zeros(rollout.action_mask.shape) for _ in range(2))
        is_in_one = torch.zeros_like(rollout.action_mask)
        for i, row in enumerate(spans):
            for span in row:
                ratio = theirs[i, span.teacher].sum() - rollout.logprobs[i, span.student].sum()
                at_each[i, span.student] = at_ends[i, span.student.stop - 1] = ratio
                is_in_one[i, span.student] = True
        return at_each, at_ends, int((rollout.action_mask & ~is_in_one).sum())

    def logprobs(self, rollout: Rollout) -> Tensor:
        """(B, R) log-probabilities of the sampled tokens, at the rollout's temperature, normalised over the candidate
        tokens if the rollout has them: those in its vocabulary, as the student's may have more padding."""
        rollout = self.reads(rollout)
        self._check_tokens(rollout.sequences(self.engine.pad_id))
        if rollout.kept is not None:
            rollout = replace(rollout, kept=rollout.kept.below(self._model.get_input_embeddings().num_embeddings))
        return per_action(self.engine, rollout, self.max_tokens,
                          lambda rows: self.engine(rows, temperature=rollout.temperature).logprobs)

    def _check_tokens(self, batch: SequenceBatch) -> None:
        size = self._model.get_input_embeddings().num_embeddings
        most = int(batch.input_ids.max()) if batch.input_ids.numel() else 0
        check(most < size, f"roles.teacher: token {most} is none of its {size}: the student's vocabulary is larger; "
                           "take a teacher with the student's own tokenizer")


def check_top_k(top_k: int, num_words: int) -> None:
    """UserError for a top_k larger than the teacher's vocabulary."""
    check(top_k <= num_words, f"distill.top_k is {top_k}, and the teacher's vocabulary has {num_words} words; give "
                              "fewer (such as 64), or 0 for all of them")


def head_tensors(model: Any) -> list[Tensor]:
    """The weights that `own_head` reads: the output embeddings, and all outside the backbone."""
    part, backbone = causal_part(model), text_backbone(model)
    inside = {id(tensor) for tensor in (*backbone.parameters(), *backbone.buffers())}
    outside = [t for t in (*part.parameters(), *part.buffers()) if id(t) not in inside]
    head = model.get_output_embeddings()
    return [*outside, *(head.parameters() if head is not None else ())]


def _hidden(module: PolicyModule, temperature: float | None) -> Callable[[SequenceBatch], tuple[Tensor, ...]]:
    """Rows -> hidden states (N, H) of their loss tokens, and the log-probabilities (N,) of these, or 0 without a
    temperature: the head is not applied then."""

    config: Any = module.model.config  # of transformers

    def ask(rows: SequenceBatch) -> tuple[Tensor, ...]:
        hidden = module.states(rows).rows
        if temperature is None:
            return hidden, hidden.new_zeros(len(hidden))
        size = chunk_rows(config.get_text_config().vocab_size, hidden.dtype)
        logprobs, _, _ = token_logprobs(hidden, predicted(rows), own_head(module.model), temperature, size,
                                        score_logits=ops_for(hidden.device.type).token_scores)
        return hidden, logprobs

    return ask


def _likeliest(engine: HybridEngine, kind: Divergence, top_k: int,
               temperature: float) -> Callable[[SequenceBatch], tuple[Tensor, ...]]:
    """Rows -> log-probabilities (N, k) and ids (N, k) of the likeliest tokens, and the log-probabilities (N,) of the
    loss tokens."""

    def ask(rows: SequenceBatch) -> tuple[Tensor, ...]:
        scores = engine(rows, temperature=temperature, top_k=top_k, top_temperature=kind.temperature)
        return scores.top_logprobs, scores.top_ids, scores.logprobs

    return ask
