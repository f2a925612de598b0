"""The physical floor of a step: the time that its matrix products take at the rate that torch reaches here at the sizes
used, plus that of the bytes that must move (weights and cache of each decode step, optimizer state) at the bandwidth
measured here; a decode step takes the longer of its bytes and its products. All rates come from the same run as the
step's own time.

It has nothing for attention's arithmetic, norms, activations, softmax over the vocabulary, adapters or the writing of
gradients: a step that fused everything perfectly would still take longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from harness import bandwidth, matrix_rate

ADAM_BYTES = 30  # per parameter: fp32 master, two moments read and written, gradient read twice, bf16 written
BYTES = 2  # of a bf16 value


class Shape(NamedTuple):
    """What a decoder multiplies: `ups` products lead into its inner size (two where it is gated), one out of it."""

    hidden: int
    inner: int
    ups: int
    kv: int  # width of all keys of a token
    layers: int
    vocab: int

    @classmethod
    def of(cls, settings: Mapping[str, int]) -> Shape:
        """From the settings of an OPT or Llama configuration."""
        hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
        kv = hidden * settings.get("num_key_value_heads", heads) // heads
        inner, ups = (settings["ffn_dim"], 1) if "ffn_dim" in settings else (settings["intermediate_size"], 2)
        return cls(hidden, inner, ups, kv, settings["num_hidden_layers"], settings["vocab_size"])

    @property
    def body(self) -> int:
        """Weights of all layers."""
        return self.layers * (2 * self.hidden * (self.hidden + self.kv) + (self.ups + 1) * self.hidden * self.inner)

    @property
    def head(self) -> int:
        return self.hidden * self.vocab

    def products(self, rows: int) -> list[tuple[int, int, int]]:
        """(rows, in, out) of one layer's products."""
        attention = [(rows, self.hidden, self.hidden)] * 2 + [(rows, self.hidden, self.kv)] * 2
        return attention + [(rows, self.hidden, self.inner)] * self.ups + [(rows, self.inner, self.hidden)]


def decode_bytes(shape: Shape, prompts: Sequence[int], limits: Sequence[int], slots: int | None = None,
                 width: int = BYTES) -> int:
    """Bytes that decoding reads: the weights once a step, and keys and values of what each token attends to.

    prompts, limits: prompt and response length of each request; slots: how many run at once, all if not given; width:
    bytes of a value. As many steps as the longest response has, or as all responses fill if every slot is always busy.
    """
    steps = max(max(limits), -(-sum(limits) // (slots or len(limits))))
    attended = sum((p + n / 2) * n for p, n in zip(prompts, limits, strict=True))
    return round(width * (steps * (shape.body + shape.head) + attended * 2 * shape.layers * shape.kv))


class Rates(NamedTuple):
    """How this machine is measured: operations per second of products (shapes, dtype), and bytes per second."""

    matrix: Callable[[list[tuple[int, int, int]], torch.dtype], float]
    memory: Callable[[], float]


def floor_of(shape: Shape, rows: int, body: float, head: tuple[int, float] = (0, 0),
             decoded: tuple[int, float] = (0, 0), trained: int = 0, dtype: torch.dtype = torch.bfloat16,
             rates: Rates | None = None) -> tuple[float, str]:
    """Seconds, and a line about them. rates: of the processor, if not given.

    rows: tokens that a pass reads; body: how many forward passes over them (a backward counts two, one where weights
    are frozen). head: tokens predicted, and forward passes of the head over them. decoded: tokens drawn, and the
    bytes of all decode steps. trained: parameters of a full optimizer.
    """
    rates = rates or Rates(matrix_rate, bandwidth)
    layers, speed = rates.matrix(shape.products(rows), dtype), rates.memory()
    parts = {f"layers at {layers / 1e9:.0f} G/s": 2 * shape.body * rows * body / layers}
    if head[0]:
        rate = rates.matrix([(head[0], shape.hidden, shape.vocab)], dtype)
        parts[f"head at {rate / 1e9:.0f} G/s"] = 2 * shape.head * head[0] * head[1] / rate
    if decoded[0]:
        seconds = {f"{speed / 1e9:.1f} GB/s": decoded[1] / speed,
                   f"{layers / 1e9:.0f} G/s": 2 * decoded[0] * (shape.body + shape.head) / layers}
        longer = max(seconds, key=lambda at: seconds[at])
        parts[f"decoding at {longer}"] = seconds[longer]
    if trained:
        parts[f"optimizer at {speed / 1e9:.1f} GB/s"] = ADAM_BYTES * trained / speed
    total = sum(parts.values())
    return total, f"floor {total:.2f} s: " + ", ".join(f"{name} {value:.2f}" for name, value in parts.items())


def ppo_floor(shape: Shape, prompts: Sequence[int], limits: Sequence[int], lora: bool,
              rates: Rates | None = None) -> tuple[float, str]:
    """Of a PPO step: prefilling, decoding, one pass of each of reference and reward, one update of actor and critic,
    whose forward could give the old values too (ours makes one more). A backward costs two forwards, one where the
    weights are frozen. The head is needed where tokens are predicted only."""
    answered, read, backward = sum(limits), sum(prompts) + sum(limits), 1 if lora else 2
    passes = {"ref": 1, "score": 1, "actor": 1 + backward, "critic": 1 + backward}
    prefill = (sum(prompts) - len(prompts)) / read
    return floor_of(shape, read, sum(passes.values()) + prefill, (answered, passes["ref"] + passes["actor"]),
                    (answered, decode_bytes(shape, prompts, limits)), 0 if lora else 2 * (shape.body + shape.head),
                    rates=rates)
