"""Bytes that training needs beside the weights: optimizer state, masters, gradients and DeepSpeed's buffers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from hybrid_rlhf.engine.train.zero_config import OFFLOADS, lowest_stage

REDUCE_BUCKET = 50_000_000  # elements that DeepSpeed flattens at once
SUB_GROUP = 10**9  # elements that ZeRO 3 steps at once
# of one parameter; 8 bits: two bytes and two fp32 scales per block of 256 (bitsandbytes)
MOMENT_BYTES = {"adamw": 8.0, "adamw_unfused": 8.0, "adamw_8bit": 2 + 8 / 256, "sgd": 0.0}


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one process beside the weights. optimizer: all the time; gradients: while micro-batches run; closing: at
    the end of the last backward, when gradients are reduced and activations are gone; stepping: during the optimizer's
    step, gradients included. host: what an offloaded optimizer keeps in the CPU's memory."""

    optimizer: int
    gradients: int
    closing: int
    stepping: int
    host: int = 0


def stage_of(dtype: torch.dtype, zero_stage: int | None, world: int, optim: str = "adamw",
             offload: Collection[str] = (), *, is_small: bool = False) -> int:
    """The ZeRO stage of training, as engine/train/zero_config.py chooses it."""
    if zero_stage is not None:
        return zero_stage
    return max([lowest_stage(dtype, world, optim, is_small=is_small), *(OFFLOADS[name] for name in offload)])


def state_bytes(count: int, dtype: torch.dtype, zero_stage: int | None, world: int = 1, optim: str = "adamw",
                offload: Collection[str] = (), *, keeps_sums: bool = True) -> StateBytes:
    """Of `count` parameters under DeepSpeed 0.19, as measured (tests/memory_plan/test_plan.py; one process, bytes
    per parameter; m is 8 for AdamW, 2 in 8 bits, 0 for SGD; g the bytes of a gradient, 4 or 2):

        dtype  ZeRO  optimizer             gradients  closing  step
        fp32   0     m                     g          g        g
        bf16   0     16 (and fp32 sums)    0          0        0
        any    1     4 + m (masters)       2 g        2 g      8
        any    2     4 + m                 g          3 g      8
        any    3     4 + m + 2 g           0          2 g      4 and, in 16 bits, 2

    Over `world` processes ZeRO 1 divides optimizer and step, ZeRO 2 and 3 the gradients too (ZeRO, 1910.02054, section
    5), and ZeRO 0 flattens a bucket at closing. A g of ZeRO 2 and 3 that is a bucket has at most 5e7 elements. bf16 at
    ZeRO 0 is ours (engine/train/adamw_master.py); with a single micro-batch it is 12, and 2 of gradients. keeps_sums:
    whether its fp32 sums stay after the step, as on a CPU; else 4 of the 16 exist in training only. An offloaded
    optimizer has its state, and gradients in fp32 and once or twice in g, in the CPU's memory, and steps there.
    """
    stage, size = stage_of(dtype, zero_stage, world, optim, offload), dtype.itemsize
    moments, bucket = MOMENT_BYTES[optim], min(count, REDUCE_BUCKET) * size
    gradient = size * count
    if stage == 0 and dtype != torch.float32:
        return StateBytes(16 * count, 0, 0, 0) if keeps_sums else StateBytes(12 * count, *[4 * count] * 3)
    if stage == 0:
        return StateBytes(round(moments * count), gradient, gradient + (bucket if world > 1 else 0), gradient)
    state = round((4 + moments) * count / world)
    gradients = {1: 2 * gradient, 2: gradient // world, 3: 0}[stage]
    closing = {1: gradients, 2: gradients + 2 * bucket, 3: 2 * bucket}[stage]
    buffers = gradient // world + bucket if stage == 3 else 0
    if "optimizer" in offload:
        host = state + (4 + size * (2 if stage == 2 else 1)) * count // world
        gradients = {1: 2 * gradient, 2: 0, 3: 0}[stage]
        closing = gradients + {1: 0, 2: bucket, 3: 2 * bucket}[stage]
        return StateBytes(bucket if stage == 3 else 0, gradients, closing, 0, host)
    stepping = (4 + (size if size == 2 else 0)) * min(count // world, SUB_GROUP) if stage == 3 else 8 * count // world
    return StateBytes(state + buffers, gradients, closing, stepping)
