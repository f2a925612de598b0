"""Predicts the seconds of a step by phase, from the operations that the memory plan traces and a device's rates.

Every sequence is as long as its role says: the longest allowed, or the data's mean. Not counted: communication of
processes, transfers of offloading, data, rewards that are functions or services, checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybrid_rlhf.algorithms.likelihood import chunk_rows
from hybrid_rlhf.memory_plan import trace
from hybrid_rlhf.memory_plan.operations import ATTENTION, FUSED, PASS, PRODUCT, Operation, Work
from hybrid_rlhf.memory_plan.plan import GENERATE, MAX_PREFILL_TOKENS, MOMENT_BYTES, Role, phases_of
from hybrid_rlhf.memory_plan.rates import Rates
from hybrid_rlhf.models import shapes

# Bytes of a packed weight: 4 bits and an fp32 scale per 64 (QLoRA, 2305.14314), or 8.
BITS = {"4bit": 4.5, "8bit": 8.0, None: 16.0}
# Numbers in fp32 that `likelihood` reads and writes per logit without a kernel: forward, for entropy in addition,
# backward.
LOGIT_PASSES = (7, 7, 9)
# The same for a divergence from a teacher (algorithms/divergence.py), forward and backward, measured for the KLs on a
# CPU: its caches serve most of some 26 and 36, for a block of rows is small. jsd takes half as much again.
DIVERGENCE_PASSES = (9, 11)
LAYER_CALLS = 30  # operations of a decode step around its layers, where each layer is one operation


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by phase. device: what they are predicted for; tokens: that a step samples, or trains on where
    it samples none; steps: of the run, if known. decode: seconds of one decode step, and of reading its weights and
    cache at the device's bandwidth. sequences: of a step, as text; lengths: where their lengths come from."""

    device: str
    phases: dict[str, float]
    tokens: int
    steps: int | None = None
    decode: tuple[float, float] | None = None
    sequences: str = ""
    lengths: str = "as long as the settings allow"

    @property
    def whole(self) -> float:
        return sum(self.phases.values())

    @property
    def longest(self) -> str:
        return max(self.phases, key=self.phases.__getitem__)


def step_time(roles: Sequence[Role], device: torch.device, rates: Rates, steps: int | None = None) -> StepTime:
    """The prediction for these roles, whose counts per step (Role.scored, .trained, Generation.sequences) are given."""
    phases = dict.fromkeys(phases_of(list(roles)), 0.0)
    tokens, decode = 0, None
    for role in (r for r in roles if not r.labels):
        timer = _RoleTime(role, device, rates)
        if role.generation:
            step = timer.decode_step()
            phases[role.generation.phase] += timer.generate(step[0])
            if role.generation.phase == GENERATE:
                decode, tokens = step, role.generation.sequences * role.generation.response
        if role.scores and role.scored:
            phases["score"] += timer.passes(role.scored, trains=False)
        if role.trains:
            phases[f"train {role.name}"] += timer.passes(role.trained, trains=True)
            phases[f"step {role.name}"] += role.updates * timer.update()
    tokens = tokens or sum(r.trained * r.length for r in roles if r.trains)
    phases = {phase: seconds / rates.reached for phase, seconds in phases.items()}
    return StepTime(rates.device, phases, tokens, steps, decode and (decode[0] / rates.reached, decode[1]),
                    _sequences(roles))


def _sequences(roles: Sequence[Role]) -> str:
    """'64 sequences of 512 + 128 tokens', or '8 rows of 1024 tokens' where nothing is sampled."""
    drawn = next((r.generation for r in roles if r.generation and r.generation.phase == GENERATE), None)
    if drawn:
        return f"{drawn.sequences} sequences of {drawn.prompt} + {drawn.response} tokens"
    trained = next((role for role in roles if role.trains), None)
    return f"{trained.trained} rows of {trained.length} tokens" if trained else "no sequences"


class _RoleTime:
    """One role's seconds at `rates`."""

    def __init__(self, role: Role, device: torch.device, rates: Rates) -> None:
        self.role, self.device, self.rates = role, device, rates
        self.sizes = trace.sizes(role.model, device, is_scalar=role.is_scalar)
        self.traced = trace.activations(role.model, device, role.rows, role.length, dropout=role.dropout,
                                        trains=role.trains, is_partitioned=False)
        self.bits = BITS[role.model.quantize]
        text = shapes.read_config(role.model).get_text_config()
        self.hidden, self.vocab, self.layers = text.hidden_size, text.vocab_size, text.num_hidden_layers
        self.is_tied = text.tie_word_embeddings
        heads = getattr(text, "num_attention_heads", 1)
        self.queries_per_key = heads // (getattr(text, "num_key_value_heads", None) or heads)
        self.dtype = {2: torch.bfloat16, 4: torch.float32}[self.sizes.itemsize]

    def passes(self, rows: int, *, trains: bool) -> float:
        """Forwards over `rows` rows, with backwards if trains, in micro-batches. Rows that share a prompt pass it once
        in a language model (models/shared_prefix.py)."""
        role, work = self.role, self.traced.train_work if trains else self.traced.score_work
        num_micro_batches = -(-rows // role.rows)
        share = 1.0
        if not role.is_scalar and (group := min(role.group, role.rows)) > 1:
            share = ((role.length - role.predicted) / group + role.predicted) / role.length
        device = rows / role.rows * share * self._of(work)
        count = num_micro_batches * work.total(lambda _: 1)
        if role.predicted and (trains or not role.only_states):
            device += self._head(rows * role.predicted, trains=trains)
            count += 20 * num_micro_batches
        return self.rates.with_host(device, count, has_gradients=trains)

    def _of(self, work: Work, *, decodes: bool = False) -> float:
        return work.total(lambda operation: self.rates.seconds(operation, self.bits, decodes=decodes))

    def _head(self, tokens: int, *, trains: bool) -> float:
        """Log-probabilities of so many tokens: the head's products, and passes over the logits. With several chunks,
        the backward computes their logits again (algorithms/likelihood.py)."""
        role = self.role
        rows = min(tokens, chunk_rows(self.vocab, self.dtype), max(1, role.rows * role.predicted))
        product = _head_product(rows, self.hidden, self.vocab, self.dtype)
        is_again = trains and role.rows * role.predicted > rows
        products = 1 + trains * (1 + is_again + (not role.model.lora.r))
        forwards, backwards = 1 + is_again, int(trains)
        return tokens / rows * (products * self.rates.seconds(product)
                                + self._logits(rows * self.vocab, forwards, backwards)
                                + self._beside(rows, forwards, backwards))

    def _beside(self, rows: int, forwards: int, backwards: int) -> float:
        """The teacher's logits of so many tokens in training, by its own head and without gradients, as often as the
        student's forward computes its own, and passes over both."""
        teacher = self.role.teacher
        if teacher is None or not backwards:
            return 0.0
        text, sizes = shapes.read_config(teacher.model).get_text_config(), trace.sizes(teacher.model, self.device)
        dtype = {2: torch.bfloat16, 4: torch.float32}[sizes.itemsize]
        product = _head_product(rows, text.hidden_size, text.vocab_size, dtype)
        numbers = forwards * DIVERGENCE_PASSES[0] + backwards * DIVERGENCE_PASSES[1]
        passes = Operation(PASS, dtype, bytes=4 * rows * text.vocab_size * numbers)
        return forwards * self.rates.seconds(product) + self.rates.seconds(passes)

    def _logits(self, count: int, forwards: int, backwards: int) -> float:
        """Softmaxes over so many logits, and their gradients."""
        forward, backward = self.rates.scores
        if forward and backward:
            return count * (forwards / forward + backwards / backward)
        numbers = forwards * (LOGIT_PASSES[0] + LOGIT_PASSES[1] * self.role.entropy) + backwards * LOGIT_PASSES[2]
        return self.rates.seconds(Operation(PASS, self.dtype, bytes=4 * count * numbers))

    def update(self) -> float:
        """One optimizer step: per trained parameter its gradient is read twice (its norm, its step), master and moments
        are read and written, and in 16 bits the weight is written. Gradients of several micro-batches are added to a
        sum in fp32."""
        role, count = self.role, self.sizes.trained
        gradient = self.sizes.trained_dtype.itemsize if self.sizes.trained_dtype else 4
        num_bytes = 2 * gradient + 8 + 2 * MOMENT_BYTES[role.optim] + (2 if gradient == 2 else 0)
        num_micro_batches = -(-role.trained // (role.rows * role.updates))
        num_bytes += (num_micro_batches - 1) * (gradient + 8)
        return self.rates.passed(count * num_bytes)

    def generate(self, step: float) -> float:
        """All decode steps of all rounds through the slots, and each prompt read once."""
        sampling = self.role.generation
        rounds = -(-sampling.sequences // self._at_once())
        tokens = sampling.sequences // self.role.group * sampling.prompt
        work = self.traced.score_work
        prefill = self.rates.with_host(
            tokens / (self.role.rows * self.role.length) * self._of(work) / sampling.tp,
            -(-tokens // MAX_PREFILL_TOKENS) * work.total(lambda _: 1))
        return rounds * sampling.response * step + prefill

    def _at_once(self) -> int:
        has_states = bool(trace.cache_bytes(self.role.model, self.device)[1])
        return self.role.generation.at_once(self.device, self.role.group, has_states)

    def decode_step(self) -> tuple[float, float]:
        """Seconds of one token for all slots, whose caches hold a prompt and half a response; and of reading weights
        and cache at the device's bandwidth."""
        sampling, model, rates = self.role.generation, self.role.model, self.rates
        slots = min(self._at_once(), sampling.sequences or sampling.slots)
        work = trace.decode_work(model, self.device, slots)
        cache = slots * trace.cache_bytes(model, self.device)[0] * (sampling.prompt + sampling.response / 2)
        attention = Operation(ATTENTION, self.dtype, count=2 * cache * self.queries_per_key / self.sizes.itemsize
                              / self.layers, bytes=cache / self.layers)
        size = self.sizes.itemsize
        head = Operation(PRODUCT, self.dtype, slots, 2.0 * slots * self.hidden * self.vocab,
                         size * (self.hidden * self.vocab + slots * (self.hidden + self.vocab)))
        draw = (slots * self.vocab / rates.draws if rates.draws else
                rates.seconds(Operation(PASS, torch.float32, bytes=slots * self.vocab * 3 * 4)))
        attend = cache / rates.cache if rates.cache else self.layers * rates.seconds(attention)
        layered = (rates.has_layers and (not model.lora.r or self.dtype == torch.bfloat16) and not model.quantize
                   and any(o.kind == FUSED for tally in work.tallies for o in tally))
        count = self.layers + LAYER_CALLS if layered else work.total(lambda _: 1)
        device = (self._of(work, decodes=True) + attend + rates.seconds(head, decodes=True) + draw) / sampling.tp
        table = 0 if self.is_tied else size * self.vocab * self.hidden  # a step reads a few of its rows
        must_read = self.sizes.weight_bytes + self.sizes.adapter_bytes - table + cache
        return rates.with_host(device, count, is_captured=True), must_read / sampling.tp / rates.peak_memory


def _head_product(rows: int, hidden: int, vocab: int, dtype: torch.dtype) -> Operation:
    """The logits of so many hidden states."""
    return Operation(PRODUCT, dtype, min(rows, hidden), 2.0 * rows * hidden * vocab,
                     dtype.itemsize * (rows * (hidden + vocab) + hidden * vocab))
