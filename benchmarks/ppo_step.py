"""Seconds of one whole PPO step beside the same step written plainly (peers/plain_ppo.py), alternating in one run.

    python benchmarks/ppo_step.py [--cases full lora ragged ragged_lora] [--json FILE] [--profile]

OPT-125m shape, bf16, batch 8, 64 prompt tokens; `full`: all weights of actor and critic are trained, four models;
`lora`: rank 16, one base for four roles; 64 response tokens each. `ragged`: as full, `ragged_lora`: as lora, response
lengths drawn once from a geometric law with mean 24, at most 64, the same for both sides. floor_ratio is our time over
that of the step's matrix products at the measured rate plus its unavoidable bytes (weights read once per decode step,
optimizer state) at the measured bandwidth. It has nothing for attention, norms, activations, softmax over the
vocabulary, adapters or the writing of gradients: a step that fused everything perfectly would still take longer. The
critic's old values cost it no forward, for the one that its update trains on gives them. wide_floor_ratio is over a
floor that also counts attention's and adapters' products, and the bytes no cache can hold: the weights of each pass,
what a forward keeps for its backward, logits, and gradients as they are written.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import harness
import torch
from floors import Shape, ppo_floor
from harness import Times, alternate, bandwidth, machine, matrix_rate, write_rows
from peers.plain_ppo import PlainPPO
from ppo_models import LORA, SHAPES, make_folders, prompts_of, roles_of, trainer_of

from hybrid_rlhf.core.allocator import keep_freed_blocks

ROWS, PROMPT, RESPONSE, MEAN = 8, 64, 64, 24
CASES = {"full": (False, False), "lora": (True, False), "ragged": (False, True), "ragged_lora": (True, True)}


def limits_of(is_ragged: bool) -> list[int]:
    if not is_ragged:
        return [RESPONSE] * ROWS
    generator = torch.Generator().manual_seed(2)
    return torch.empty(ROWS).geometric_(1 / MEAN, generator=generator).clamp(1, RESPONSE).int().tolist()


class Ours:
    """Our step, with lengths given from outside."""

    def __init__(self, place: Path, lora: bool, limits: list[int]) -> None:
        share = "all" if lora else "none"
        roles, reward = roles_of(place, lora=lora, share=share, micro_batch_tokens=8192)
        self.trainer, self.prompts = trainer_of(roles, reward, max(limits)), prompts_of(place, ROWS, PROMPT)
        engine = roles.actor.engine
        generate = engine.generate
        engine.generate = lambda *given, **named: generate(*given, **named | {"limits": limits})
        self.seconds: dict[str, float] = {}

    def step(self) -> None:
        metrics = self.trainer.step(self.prompts).compute()
        self.seconds = {k: v for k, v in metrics.items() if k.startswith("time/") or k == "engine/logprob_drift"}


def floor_seconds(shape: str, lora: bool, limits: list[int]) -> tuple[float, float, str]:
    """Seconds that the step's products and bytes take at this machine's own rates, those of the wide floor, and a line
    about them."""
    model = Shape.of(SHAPES[shape][1])
    floor, line = ppo_floor(model, [PROMPT] * ROWS, limits, lora)
    operations, num_bytes = beyond_products(model, lora, limits)
    rate = matrix_rate(model.products(ROWS * PROMPT + sum(limits)), torch.bfloat16)
    wide = floor + operations / rate + num_bytes / bandwidth()
    return floor, wide, f"{line}; wide floor {wide:.2f} s: {operations:.2g} operations, {num_bytes / 1e9:.2f} GB more"


def beyond_products(model: Shape, lora: bool, limits: list[int]) -> tuple[float, float]:
    """Operations and bytes that the floor leaves out and no step can: four forwards and two backwards, in 16 bits.

    Attention looks back only, and its backward takes 2.5 forwards. A forward with gradients keeps eight states of the
    hidden size and two of the inner one (a gated MLP three) of each token and layer, written once and read once. Logits
    are written and read by reference and actor, read again for the gradient, which is written and read (twice where it
    makes a weight's). An adapter takes rank x (in + out) products a token in three forwards, twice that in a backward.
    """
    read, answered = ROWS * PROMPT + sum(limits), sum(limits)
    attention = model.layers * sum(2 * model.hidden * (PROMPT + n) ** 2 for n in limits) * (4 + 2 * 2.5)
    sides = sum(i + o for _, i, o in model.products(read))
    adapters = 2 * LORA.r * model.layers * sides * read * (3 + 2 * 2) if lora else 0
    kept = 2 * 2 * read * model.layers * (8 * model.hidden + (model.ups + 1) * model.inner)
    logits = answered * model.vocab * (4 + 1 + 1 + (1 if lora else 2))
    gradients = 0 if lora else 2 * model.body + model.head
    return attention + adapters, 2 * (model.body * (4 + 2) + kept + logits + gradients)


def measure(name: str, shape: str, place: Path, repeats: int) -> dict:
    lora, is_ragged = CASES[name]
    limits = limits_of(is_ragged)
    ours, plain = Ours(place, lora, limits), PlainPPO(place / "base", place / "reward", limits, LORA.r if lora else 0)
    ids = torch.tensor(ours.prompts.ids)
    mine, theirs = alternate(repeats, ours.step, lambda: plain.step(ids))
    floor, wide, line = floor_seconds(shape, lora, limits)
    row = {"case": name, "ours": mine.median, "peer": theirs.median, "ratio": theirs.median / mine.median,
           "floor_ratio": mine.median / floor, "wide_floor_ratio": mine.median / wide, "unit": "s/step",
           "machine": machine()}
    report(name, mine, theirs, row, line, ours.seconds)
    return row


def report(name: str, mine: Times, theirs: Times, row: dict, line: str, phases: dict[str, float]) -> None:
    print(f"{name:12} ours {mine}  plain {theirs} s/step  ratio {row['ratio']:.2f}  floor_ratio "
          f"{row['floor_ratio']:.2f} (wide {row['wide_floor_ratio']:.2f})", flush=True)
    print(f"{'':12} {line}\n{'':12} " + ", ".join(f"{k} {v:.3f}" for k, v in sorted(phases.items())), flush=True)


def profile(name: str, place: Path) -> None:
    """Where one of our steps spends its time, by operation."""
    from torch.profiler import ProfilerActivity, profile

    lora, is_ragged = CASES[name]
    ours = Ours(place, lora, limits_of(is_ragged))
    ours.step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        ours.step()
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--shape", choices=list(SHAPES), default="opt125m")
    parser.add_argument("--repeats", type=int, default=5, help="measured steps of each side; the median counts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true",
                        help="one thread's processor time in place of the wall's, on a machine that others use too")
    parser.add_argument("--profile", action="store_true", help="print where our step spends its time instead")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    if options.cpu_time:
        harness.clock[0], options.threads = time.process_time, 1
    torch.set_num_threads(options.threads)
    keep_freed_blocks()  # as the launcher does; the plain step, in the same process, profits as well
    with tempfile.TemporaryDirectory() as folder:
        make_folders(options.shape, Path(folder))
        if options.profile:
            for name in options.cases:
                profile(name, Path(folder))
            return
        write_rows((measure(name, options.shape, Path(folder), options.repeats) for name in options.cases),
                   options.json)


if __name__ == "__main__":
    main()
