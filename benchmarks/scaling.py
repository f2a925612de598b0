"""How time and memory grow: rollouts, PPO steps and GRPO steps over batch, prompt, response, model, vocabulary, group.

    python benchmarks/scaling.py [--axes batch prompt ...] [--works rollout ppo grpo] [--json FILE] [--page FILE]

Llama shapes in bf16, random weights: hidden size 128, 4 layers, a vocabulary of 2,048, 8 sequences of 64 + 32 tokens
(GRPO: 2 prompts, 4 samples each); each axis changes one of them. `requests` are ragged responses through 16 slots.
Seconds are medians of all sizes of an axis in turns, after a round without measuring. Memory is the most that a second
step held, resident, beyond what the process held before its models were made; each size in a process of its own, which
has done a smaller one before and whose allocator gives freed blocks back. Growth is called too fast where the last step
from size to size costs more than `ALLOWED` says, and a curve explains it better than a line. floor_ratio is the time of
the largest size over its products and bytes; at these sizes it says little. --page puts the tables into FILE.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import harness
import numpy as np
import torch
from floors import Shape, decode_bytes, floor_of, ppo_floor
from grpo_step import our_step
from harness import Case, Times, alternate, memory_status, row_of, run_apart, table_of, write_rows, write_tables
from random_models import SHAPES, make_folders, prompts_of, ragged_limits, roles_of, tokenizer_of, trainer_of

from hybrid_rlhf.core.allocator import give_back_freed_blocks, keep_freed_blocks
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.device_memory import meter
from hybrid_rlhf.rollout import Prompts


class Point(NamedTuple):
    """Sizes of one measurement. batch: sequences; group: samples of a prompt; slots: sequences at once, 0: all."""

    hidden: int = 128
    vocab: int = 2048
    batch: int = 8
    prompt: int = 64
    response: int = 32
    group: int = 4
    slots: int = 0
    layers: int = 4

    @property
    def settings(self) -> dict[str, int]:
        return dict(hidden_size=self.hidden, intermediate_size=self.hidden * 5 // 2, num_hidden_layers=self.layers,
                    num_attention_heads=4, num_key_value_heads=4, vocab_size=self.vocab, max_position_embeddings=2048)

    @property
    def limits(self) -> list[int]:
        """Response lengths: all the same, or geometric where slots are filled again and again."""
        if not self.slots:
            return [self.response] * self.batch
        return ragged_limits(self.batch, 12, self.response, torch.Generator().manual_seed(5))

    @property
    def weights(self) -> int:
        shape = Shape.of(self.settings)
        return shape.body + shape.head


class Axis(NamedTuple):
    """What changes, over which points, and the works that it makes sense for."""

    points: list[Point]
    size: Callable[[Point], int]
    unit: str
    works: tuple[str, ...] = ("rollout", "ppo", "grpo")


AXES = {
    "batch": Axis([Point(batch=n) for n in (8, 16, 32, 64, 128)], lambda p: p.batch, "sequences"),
    "requests": Axis([Point(batch=n, slots=16) for n in (32, 64, 128, 256, 512)], lambda p: p.batch,
                     "requests, 16 at once", ("rollout",)),
    "prompt": Axis([Point(prompt=n) for n in (32, 64, 128, 256, 512)], lambda p: p.prompt, "tokens"),
    "response": Axis([Point(response=n) for n in (16, 32, 64, 128, 256)], lambda p: p.response, "tokens"),
    "model": Axis([Point(hidden=n) for n in (64, 128, 192, 256, 384)], lambda p: p.weights, "weights"),
    "vocabulary": Axis([Point(vocab=n) for n in (1024, 2048, 4096, 8192, 16384)], lambda p: p.vocab, "tokens"),
    "group": Axis([Point(batch=2 * n, group=n) for n in (2, 4, 8, 16, 32)], lambda p: p.group,
                  "samples of each of 2 prompts", ("rollout", "grpo")),
}
# The power by which cost may grow from the last size but one to the last: 1 and 0.15 for noise. Attention over prompt
# and response is quadratic: at these sizes up to a third of the products' operations, and slower than they are.
ALLOWED = {name: 1.5 if name in ("prompt", "response") else 1.15 for name in AXES}
CURVED = 0.15  # of the largest size's cost


# -- the works ---------------------------------------------------------------------------------------------------------


def folder_of(point: Point, place: Path) -> Path:
    """A base and a reward model of the point's shape, made once."""
    name = f"{point.hidden}-{point.vocab}-{point.layers}"
    if not (place / name).exists():
        SHAPES[name] = ("llama", point.settings)
        make_folders(name, place / name)
    return place / name


def rollout(point: Point, place: Path) -> Callable[[], None]:
    from transformers import AutoModelForCausalLM

    folder = folder_of(point, place)
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    engine = HybridEngine.for_inference(model, SimpleNamespace(eos_token_id=None, pad_token_id=0))
    engine.max_batch = point.slots or point.batch
    distinct = prompts_of(folder, point.batch // point.group, point.prompt).ids
    prompts = [ids for ids in distinct for _ in range(point.group)]
    sampling = SamplingConfig(max_new_tokens=point.response)

    def step() -> None:
        with engine.inference():
            engine.generate(prompts, sampling, limits=point.limits)

    return step


def ppo(point: Point, place: Path) -> Callable[[], None]:
    folder = folder_of(point, place)
    roles, reward = roles_of(folder, lora=False, share="none", micro_batch_tokens=1024)
    trainer, prompts = trainer_of(roles, reward, point.response), prompts_of(folder, point.batch, point.prompt)
    return lambda: trainer.step(prompts).compute()


def grpo(point: Point, place: Path) -> Callable[[], None]:
    folder, tokenizer = folder_of(point, place), tokenizer_of(point.vocab)
    ids = prompts_of(folder, point.batch // point.group, point.prompt).ids
    prompts = Prompts(ids, [""] * len(ids))
    return our_step(folder, tokenizer, prompts, point.limits, point.group).step


WORKS: dict[str, Callable[[Point, Path], Callable[[], None]]] = {"rollout": rollout, "ppo": ppo, "grpo": grpo}


def floor(work: str, point: Point) -> float:
    """Seconds of the work's products and bytes, as ppo_step.py and grpo_step.py count them."""
    shape, limits, prompts = Shape.of(point.settings), point.limits, [point.prompt] * point.batch
    read, answered = point.batch * point.prompt + sum(limits), sum(limits)
    decoded = sum(limits), decode_bytes(shape, prompts, limits, point.slots or None)
    every = shape.body + 2 * shape.head
    if work == "rollout":
        return floor_of(shape, point.batch // point.group * point.prompt, 1, decoded=decoded)[0]
    if work == "ppo":
        return ppo_floor(shape, prompts, limits, False)[0]
    return floor_of(shape, read, 4 + point.batch // point.group * point.prompt / read, (answered, 4), decoded, every)[0]


# -- growth ------------------------------------------------------------------------------------------------------------


def last_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The power by which the cost grows from the last size but one to the last, where constants weigh least."""
    return float(np.log(costs[-1] / costs[-2]) / np.log(sizes[-1] / sizes[-2]))


def bend(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The share of the largest size's cost that grows with the square of the size, from a fit of constant + slope *
    size + curve * size ** 2 with relative residuals: 0 where growth is linear, negative where it flattens."""
    x, y = np.asarray(sizes, float), np.asarray(costs, float)
    columns = np.stack([1 / y, x / y, x * x / y], 1)
    scale = np.abs(columns).max(0)
    fit = np.linalg.lstsq(columns / scale, np.ones_like(y), rcond=None)[0] / scale
    return float(fit[2] * x[-1] ** 2 / (fit @ np.array([1, x[-1], x[-1] ** 2])))


def growth_of(axis: str, sizes: Sequence[float], costs: Sequence[float]) -> dict:
    last, curve = last_exponent(sizes, costs), bend(sizes, costs)
    return {"last": last, "bend": curve, "is_too_fast": last > ALLOWED[axis] and curve > CURVED}


# -- measuring ---------------------------------------------------------------------------------------------------------


def points_of(axis: str, is_quick: bool) -> list[Point]:
    if is_quick:
        return [Point(hidden=32, vocab=256, batch=n, prompt=8, response=4, layers=1) for n in (4, 8, 16)]
    return AXES[axis].points


def peak_bytes(work: str, point: Point, folder: Path) -> int:
    """Bytes that a step holds at most, models included, in this process."""
    place = Path(tempfile.mkdtemp(dir=folder))  # two processes never write the same models
    step = WORKS[work](Point(hidden=32, vocab=1024, batch=4), place)  # what is imported and kept on the way
    step()
    del step
    folder_of(point, place)
    gc.collect()
    before = memory_status("VmRSS")
    step = WORKS[work](point, place)
    step()
    with meter.block(torch.device("cpu")) as peak:
        step()
    return peak[0] - before


def peaks_of(work: str, axes: list[str], is_quick: bool) -> dict[str, list[int]]:
    """In a process that forks, before it computes anything, once for each size of each axis, two of them at a time."""
    import deepspeed  # noqa: F401 - everything that is large to import
    import transformers.models.llama.modeling_llama  # noqa: F401

    torch.set_num_threads(1)
    give_back_freed_blocks()
    with (tempfile.TemporaryDirectory() as folder,
          multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool):
        jobs = [(work, point, Path(folder)) for axis in axes for point in points_of(axis, is_quick)]
        peaks = iter(pool.starmap(peak_bytes, jobs, chunksize=1))
    return {axis: [next(peaks) for _ in points_of(axis, is_quick)] for axis in axes}


def measured(work: str, axis: str, points: list[Point], times: list[Times], peaks: list[int],
             floor_seconds: float) -> dict:
    sizes, medians = [AXES[axis].size(p) for p in points], [t.median for t in times]
    fits = {"time": growth_of(axis, sizes, medians), "memory": growth_of(axis, sizes, [max(1, b) for b in peaks])}
    case = Case(f"{work}, {axis} {sizes[0]:,} to {sizes[-1]:,}: last step, time x size^{fits['time']['last']:.2f}, "
                f"memory x size^{fits['memory']['last']:.2f}")
    missed = ["ours"] if any(fit["is_too_fast"] for fit in fits.values()) else []
    return row_of(f"{work} by {axis}", case, medians[-1], None, "s", medians[-1] / floor_seconds,
                  asked=f"<= size^{ALLOWED[axis]:g}", missed=missed, sizes=sizes, of=AXES[axis].unit, seconds=medians,
                  ranges=[[t.least, t.most] for t in times], bytes=peaks, fits=fits)


def measure(options: argparse.Namespace, place: Path) -> Iterator[dict]:
    for work in options.works:
        axes = [axis for axis in options.axes if work in AXES[axis].works]
        if not axes:
            continue
        peaks = run_apart(peaks_of, {"OMP_NUM_THREADS": "1"}, work=work, axes=axes, is_quick=options.quick)
        for axis in axes:
            points = points_of(axis, options.quick)
            times = alternate(options.repeats, *(WORKS[work](point, place) for point in points))
            gc.collect()
            yield measured(work, axis, points, times, peaks[axis], floor(work, points[-1]))


def tables_of(rows: Sequence[dict]) -> list[str]:
    """The machine, seconds, and MB."""
    columns = "work", "axis", "sizes", "of", "cost at each", "last step", "curve", ""
    return [table_of(["machine"], [[rows[0]["machine"]]]), *(table_of(columns, [(
        *row["case"].split(" by "), ", ".join(f"{size:,}" for size in row["sizes"]), row["of"],
        ", ".join(f"{cost / unit:.3g}" for cost in row[key]), f"n^{row['fits'][what]['last']:.2f}",
        f"{row['fits'][what]['bend']:.2f}", "**too fast**" if row["fits"][what]["is_too_fast"] else "")
        for row in rows]) for what, key, unit in (("time", "seconds", 1), ("memory", "bytes", 1e6)))]


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.add_clock(harness.parser_of(__doc__, repeats=3))
    parser.add_argument("--axes", nargs="+", choices=list(AXES), default=list(AXES),
                        help="a quick run has small batches alone")
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--page", type=Path, help="put the tables of seconds and of memory into this page")
    options = harness.parse(parser, argv)
    options.axes = ["batch"] if options.quick else options.axes
    keep_freed_blocks()
    with tempfile.TemporaryDirectory() as folder:
        rows = write_rows(measure(options, Path(folder)), options.json)
    if options.page:
        write_tables(options.page, *tables_of(rows))


if __name__ == "__main__":
    main()
