"""How time and memory grow: rollouts, PPO steps and GRPO steps over batch, prompt, response, model, vocabulary, group.

    python benchmarks/scaling.py [--axes batch prompt ...] [--works rollout ppo grpo] [--json FILE] [--page FOLDER]

Llama shapes in bf16, random weights: hidden size 128, 4 layers, a vocabulary of 2,048, 8 sequences of 64 + 32 tokens
(GRPO: 2 prompts, 4 samples each); each axis changes one of them. `requests` are ragged responses through 16 slots.
Seconds are medians of all sizes of an axis in turns, after a round without measuring. Memory is the most that a second
step held, resident, beyond what the process held before its models were made; each size in a process of its own, which
has done a smaller one before and whose allocator gives freed blocks back. The fits are in growth.py. Growth is called
too fast where the last step from size to size costs more than `ALLOWED` says, and a curve explains it better than a
line.
floor_ratio is the time of the largest size over its products and bytes; at these sizes it says little.
--page writes scaling.md and its pictures.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import growth
import harness
import torch
from floors import Shape, decode_bytes, floor_of, ppo_floor
from grpo_step import Ours as GrpoStep
from grpo_step import tokenizer_of
from harness import alternate, machine, status, write_rows
from peers.process import ENVIRONMENT
from ppo_models import SHAPES, make_folders, prompts_of, roles_of, trainer_of

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
        draws = torch.Generator().manual_seed(5)
        return torch.empty(self.batch).geometric_(1 / 12, generator=draws).clamp(1, self.response).int().tolist()

    @property
    def weights(self) -> int:
        shape = Shape.of(self.settings)
        return shape.body + shape.head


class Axis(NamedTuple):
    """What changes, over which points, and the works that it makes sense for."""

    points: list[Point]
    size: Callable[[Point], int]
    works: tuple[str, ...] = ("rollout", "ppo", "grpo")
    unit: str = ""


AXES = {
    "batch": Axis([Point(batch=n) for n in (8, 16, 32, 64, 128)], lambda p: p.batch, unit="sequences"),
    "requests": Axis([Point(batch=n, slots=16) for n in (32, 64, 128, 256, 512)], lambda p: p.batch, ("rollout",),
                     "requests, 16 at once"),
    "prompt": Axis([Point(prompt=n) for n in (32, 64, 128, 256, 512)], lambda p: p.prompt, unit="tokens"),
    "response": Axis([Point(response=n) for n in (16, 32, 64, 128, 256)], lambda p: p.response, unit="tokens"),
    "model": Axis([Point(hidden=n) for n in (64, 128, 192, 256, 384)], lambda p: p.weights, unit="weights"),
    "vocabulary": Axis([Point(vocab=n) for n in (1024, 2048, 4096, 8192, 16384)], lambda p: p.vocab, unit="tokens"),
    "group": Axis([Point(batch=2 * n, group=n) for n in (2, 4, 8, 16, 32)], lambda p: p.group, ("rollout", "grpo"),
                  "samples of each of 2 prompts"),
}
# The power by which cost may grow from the last size but one to the last: 1 and 0.15 for noise. Attention over prompt
# and response is quadratic: at these sizes up to a third of the products' operations, and slower than they are.
ALLOWED = {name: 1.5 if name in ("prompt", "response") else 1.15 for name in AXES}
CURVED = 0.15  # of the largest size's cost


# -- the works ---------------------------------------------------------------------------------------------------------


def folder_of(point: Point, place: Path) -> Path:
    """A base and a reward model of the point's shape, made once."""
    name = f"{point.hidden}-{point.vocab}"
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
    return GrpoStep(folder / "base", tokenizer, prompts, point.limits, point.group).step


WORKS: dict[str, Callable[[Point, Path], Callable[[], None]]] = {"rollout": rollout, "ppo": ppo, "grpo": grpo}


def floor(work: str, point: Point) -> float:
    """Seconds of the work's products and bytes, as ppo_step.py and grpo_step.py count them."""
    shape, limits, prompts = Shape.of(point.settings), point.limits, [point.prompt] * point.batch
    read, answered = point.batch * point.prompt + sum(limits), sum(limits)
    decoded = decode_bytes(shape, prompts, limits, point.slots or None)
    every = shape.body + 2 * shape.head
    if work == "rollout":
        return floor_of(shape, point.batch // point.group * point.prompt, 1, decoded=decoded)[0]
    if work == "ppo":
        return ppo_floor(shape, prompts, limits, False)[0]
    return floor_of(shape, read, 4 + point.batch // point.group * point.prompt / read, (answered, 4), decoded, every)[0]


# -- measuring ---------------------------------------------------------------------------------------------------------


def times(work: str, axis: Axis, place: Path, repeats: int) -> list[harness.Times]:
    return alternate(repeats, *(WORKS[work](point, place) for point in axis.points))


def held(work: str, point: Point, place: Path) -> int:
    """Bytes that a step holds at most, models included, in this process."""
    step = WORKS[work](Point(hidden=32, vocab=1024, batch=4), place)  # what is imported and kept on the way
    step()
    del step
    folder_of(point, place)
    gc.collect()
    before = status("VmRSS")
    step = WORKS[work](point, place)
    step()
    with meter.block(torch.device("cpu")) as peak:
        step()
    return peak[0] - before


def held_apart(work: str, names: list[str], is_quick: bool) -> dict[str, list[int]]:
    """The bytes of each size of each axis; a process forks, before it computes anything, once for each size, and two
    of those run at a time."""
    command = [sys.executable, __file__, "--child", work, "--axes", *names, "--threads", "1"]
    done = subprocess.run([*command, "--quick"] if is_quick else command, stdout=subprocess.PIPE, text=True,
                          env=ENVIRONMENT | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{work}: the measuring process failed with {done.returncode}; see above")
    return json.loads(done.stdout.splitlines()[-1])


def forked(work: str, names: list[str], place: Path) -> dict[str, list[int]]:
    """In the process that forks."""
    import deepspeed  # noqa: F401 - everything that is large to import
    import transformers.models.llama.modeling_llama  # noqa: F401

    jobs = [(name, i) for name in names for i in range(len(AXES[name].points))]
    found = {name: [0] * len(AXES[name].points) for name in names}
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        answers = pool.starmap(_held_job, [(work, *job, place) for job in jobs], chunksize=1)
    for (name, i), size in zip(jobs, answers, strict=True):
        found[name][i] = size
    return found


def _held_job(work: str, name: str, number: int, place: Path) -> int:
    own = Path(tempfile.mkdtemp(dir=place))  # two processes never write the same models
    return held(work, AXES[name].points[number], own)


def is_too_fast(axis: str, sizes: list[int], costs: list[float]) -> bool:
    return growth.local_exponent(sizes, costs) > ALLOWED[axis] and growth.bend(sizes, costs) > CURVED


def row_of(work: str, name: str, found: list[harness.Times], sizes_held: list[int], floor_seconds: float) -> dict:
    axis = AXES[name]
    sizes, seconds = [axis.size(p) for p in axis.points], [t.median for t in found]
    fits = {what: {"line": growth.line(sizes, costs)._asdict(), "power": growth.power(sizes, costs)._asdict(),
                   "bend": growth.bend(sizes, costs), "last": growth.local_exponent(sizes, costs),
                   "is_too_fast": is_too_fast(name, sizes, costs)}
            for what, costs in (("time", seconds), ("memory", [max(1, b) for b in sizes_held]))}
    exponents = [fits[what]["last"] for what in fits]
    row = {"case": f"{work} by {name}", "work": f"{work}, {name} {sizes[0]:,} to {sizes[-1]:,}: last step, time x size^"
           f"{exponents[0]:.2f}, memory x size^{exponents[1]:.2f}", "ours": seconds[-1], "peer": None, "ratio": None,
           "asked": f"<= size^{ALLOWED[name]:g}", "is_missed": any(f["is_too_fast"] for f in fits.values()),
           "floor_ratio": seconds[-1] / floor_seconds, "unit": "s", "machine": machine(), "sizes": sizes,
           "seconds": seconds, "ranges": [t[1:] for t in found], "bytes": sizes_held, "fits": fits, "of": axis.unit}
    print(f"{row['case']:22} {' '.join(f'{s:8.3f}' for s in seconds)} s   "
          f"{' '.join(f'{b / 1e6:7.1f}' for b in sizes_held)} MB   last step: time {exponents[0]:.2f}, memory "
          f"{exponents[1]:.2f}{'   TOO FAST' if row['is_missed'] else ''}", flush=True)
    return row


def measure(options: argparse.Namespace, place: Path) -> Iterable[dict]:
    for work in options.works:
        names = [name for name in options.axes if work in AXES[name].works]
        memory = held_apart(work, names, options.quick) if names else {}
        for name in names:
            found = times(work, AXES[name], place, options.repeats)
            gc.collect()
            yield row_of(work, name, found, memory[name], floor(work, AXES[name].points[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", choices=list(AXES), default=list(AXES))
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--repeats", type=int, default=3, help="measured rounds; the median counts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true",
                        help="one thread's processor time in place of the wall's, on a machine that others use too")
    parser.add_argument("--quick", action="store_true", help="the three smallest sizes of each axis")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--page", help="write scaling.md and its pictures to this folder")
    parser.add_argument("--child", choices=list(WORKS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cpu_time:
        harness.clock[0], options.threads = time.process_time, 1
    torch.set_num_threads(options.threads)
    for name in AXES if options.quick else ():
        AXES[name] = AXES[name]._replace(points=AXES[name].points[:3])
    (give_back_freed_blocks if options.child else keep_freed_blocks)()
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        if options.child:
            print(json.dumps(forked(options.child, options.axes, Path(folder))))
            return
        write_rows((rows.append(row) or row for row in measure(options, Path(folder))), options.json)
    if options.page:
        from scaling_page import write

        write(rows, Path(options.page), options.repeats)


if __name__ == "__main__":
    main()
