"""Whole PPO steps on a card: sequences per second at the largest batch that fits, where the time goes, floor and peak.

    benchmarks/gpu.sh ppo                       all cases, each in a process of its own
    python benchmarks/gpu_ppo.py --out FOLDER   gpu_ppo.json, gpu_ppo.md [--cases opt-1.3b-lora ...] [--seconds 240]
    python benchmarks/gpu_ppo.py --dry-run      the same at tiny sizes on the processor

Random weights in bf16. A step is: generate (no stop tokens), score by reference, critic and reward, one update of actor
and critic. The batch is doubled until a step does not fit, gains less than 5%, or the case's share of the time is used
up; each is measured once after an unmeasured step. `known` is DeepSpeed-Chat's published figure on one A100-80G, whose
step this is. floor_ratio is the step's time over its products at the rate of a bf16 product of its sizes plus its bytes
at the rate of a copy, both measured in the same process (floors.py). QLoRA holds the base in NF4; its floor is in bf16.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import harness
import torch
from floors import Rates, Shape, ppo_floor
from gpu import machine
from harness import measuring, seconds, table_of, write_rows, write_tables
from random_models import SHAPES, make_folders, prompts_of, roles_of, trainer_of

from hybrid_rlhf.engine.device_memory import meter

GAIN = 1.05  # by which twice the batch must be faster to be tried twice more


class Case(NamedTuple):
    """share: of the time; need: packages beyond the library's; known: sequences per second elsewhere; asked: at least
    so many times that; room: GiB that the peak may take."""

    shape: str
    lora: bool
    prompt: int
    response: int
    batches: tuple[int, ...]
    share: float
    need: tuple[str, ...] = ("deepspeed", "peft")
    known: float | None = None
    room: float | None = None
    micro_batch_tokens: int = 8192

    @property
    def is_4bit(self) -> bool:
        return "bitsandbytes" in self.need


ASKED = 5
LARGE = {
    "opt1.3b": ("opt", dict(hidden_size=2048, ffn_dim=8192, num_hidden_layers=24, num_attention_heads=32,
                            vocab_size=50272, word_embed_proj_dim=2048, max_position_embeddings=2048, dropout=0.0)),
    "opt13b": ("opt", dict(hidden_size=5120, ffn_dim=20480, num_hidden_layers=40, num_attention_heads=40,
                           vocab_size=50272, word_embed_proj_dim=5120, max_position_embeddings=2048, dropout=0.0)),
    "llama8b": ("llama", dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                              num_key_value_heads=8, vocab_size=128256, max_position_embeddings=4096)),
}
DRY = {
    "opt": ("opt", dict(hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=131,
                        word_embed_proj_dim=64, max_position_embeddings=128, dropout=0.0)),
    "llama": ("llama", dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                            num_key_value_heads=2, vocab_size=131, max_position_embeddings=128)),
}
CASES = {
    "opt-1.3b-lora": Case("opt1.3b", True, 256, 256, (64, 128, 256, 512), 0.2, known=6.27),
    "opt-1.3b-full": Case("opt1.3b", False, 256, 256, (64, 128, 256, 512), 0.25, known=6.27),
    "opt-13b-lora": Case("opt13b", True, 256, 256, (32, 64, 128, 256), 0.35, known=0.62),
    "llama-8b-qlora": Case("llama8b", True, 512, 512, (8, 16, 32), 0.2, ("deepspeed", "peft", "bitsandbytes"), room=24,
                           micro_batch_tokens=2048),
}
SHAPES |= LARGE | DRY


def lacking(case: Case) -> list[str]:
    return [name for name in case.need if sys.modules.get(name, 0) is None or not importlib.util.find_spec(name)]


# -- one case, in a process of its own ---------------------------------------------------------------------------------


def rates_of(device: torch.device, size: int) -> Rates:
    """Measured on the device. size: bytes of the copy."""

    @torch.no_grad()
    def matrix(shapes: list[tuple[int, int, int]], dtype: torch.dtype) -> float:
        rate = []
        for rows, width, out in dict.fromkeys(shapes):
            rows = min(rows, 16384)
            left, right = torch.randn(rows, width, device=device, dtype=dtype), torch.randn(out, width, device=device,
                                                                                             dtype=dtype)

            def multiply(left: torch.Tensor = left, right: torch.Tensor = right) -> None:
                torch.nn.functional.linear(left, right)

            multiply()
            count = shapes.count((rows, width, out)) or 1
            rate.append((count * 2 * rows * width * out, count * min(seconds(multiply) for _ in range(3))))
        return sum(operations for operations, _ in rate) / sum(taken for _, taken in rate)

    def memory() -> float:
        source = torch.empty(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        target.copy_(source)
        return 2 * size / min(seconds(lambda: target.copy_(source)) for _ in range(5))

    return Rates(matrix, memory)


def steps(name: str, case: Case, place: Path, budget: float, device: torch.device) -> Iterator[dict]:
    """A row for each batch that fits; the last says why there is no larger one. budget: seconds."""
    rates = rates_of(device, 2**31 if device.type == "cuda" else 2**20)
    shape, end = Shape.of(SHAPES[case.shape][1]), time.monotonic() + budget
    roles, reward = roles_of(place, lora=case.lora, share="all" if case.lora else "none", is_4bit=case.is_4bit,
                             micro_batch_tokens=case.micro_batch_tokens)
    trainer = trainer_of(roles, reward, case.response)
    best = 0.0
    for batch in case.batches:
        prompts, roles.actor.engine.max_batch = prompts_of(place, batch, case.prompt), batch
        found: dict = {}
        try:
            with meter.block(device) as peak:  # the engine sets torch's own mark back in every phase
                first, took = (seconds(lambda prompts=prompts, found=found: found.update(
                    trainer.step(prompts).compute())) for _ in range(2))
        except Exception as error:
            if not is_full(error):
                raise
            print(f"{'':16} {batch} sequences do not fit: {str(error).splitlines()[0][:120]}", flush=True)
            return
        floor, line = ppo_floor(shape, [case.prompt] * batch, [case.response] * batch, case.lora, rates)
        yield row_of(name, case, batch, took, floor, line, found, peak[0])
        if batch / took < GAIN * best or time.monotonic() + 2 * (first + took) > end:
            return
        best = batch / took


def is_full(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "memory" in str(error).lower()


def row_of(name: str, case: Case, batch: int, took: float, floor: float, line: str, found: dict, peak: int) -> dict:
    parts = {k.removeprefix("time/"): v for k, v in found.items() if k.startswith("time/")}
    about = harness.Case(f"PPO steps of {batch}", "DeepSpeed-Chat, A100", ASKED if case.known else None)
    row = harness.row_of(
        name, about, batch / took, case.known, "sequences/s", took / floor, machine=machine(), batch=batch,
        seconds=took, parts=parts, peak=peak, drift=found.get("engine/logprob_drift"),
        tokens=[case.prompt, case.response])
    print(f"{'':16} {line}", flush=True)
    return row


def child(name: str, options: argparse.Namespace) -> None:
    case = dry(CASES[name]) if options.dry_run else CASES[name]
    device = torch.device("cpu" if options.dry_run else "cuda")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        make_folders(case.shape, Path(folder), str(device), has_reward=not case.lora)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        made = time.monotonic() - began
        print(f"{name:16} its models were drawn and written in {made:.0f} s", flush=True)
        write_rows(steps(name, case, Path(folder), options.seconds - made, device), options.json)


def dry(case: Case) -> Case:
    return case._replace(shape="llama" if "llama" in case.shape else "opt", prompt=8, response=6, batches=(2, 4))


# -- all of them -------------------------------------------------------------------------------------------------------


def run(name: str, options: argparse.Namespace, out: Path) -> tuple[list[dict], str]:
    """The rows of a case and what went wrong, if anything."""
    case, limit = CASES[name], options.seconds * CASES[name].share / sum(CASES[n].share for n in options.cases)
    if lacking(case):
        return [], f"{name} was left out: {', '.join(lacking(case))} is not installed (its wheel may lie in wheels/)"
    path = out / f"gpu_ppo_{name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--child", name, "--json", str(path), "--seconds", str(0.9 * limit)]
    fault = ""
    try:
        code = subprocess.run([*command, "--dry-run"] if options.dry_run else command, timeout=limit).returncode
        fault = f"{name} ended with {code}" if code else ""
    except subprocess.TimeoutExpired:
        fault = f"{name} was stopped after {limit:.0f} s"
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    path.unlink(missing_ok=True)
    return rows, fault or ("" if rows else f"{name}: not even the smallest batch fits")


def tables_of(rows: list[dict], faults: list[str]) -> list[str]:
    columns = ("case", "tokens", "batch", "sequences/s", "DeepSpeed-Chat, A100", f"ratio (asked >= {ASKED})",
               "generate, score, train (s)", "time / floor", "peak, GiB", "asked")
    lines = []
    for r in rows:
        is_best = r is max((x for x in rows if x["case"] == r["case"]), key=lambda x: x["ours"])
        rate, room = f"{r['ours']:.2f}", CASES[r["case"]].room
        lines.append((r["case"], " + ".join(map(str, r["tokens"])), r["batch"], f"**{rate}**" if is_best else rate,
                      r["peer"], r["ratio"] and f"{r['ratio']:.1f}",
                      ", ".join(f"{r['parts'].get(k, float('nan')):.2f}" for k in ("generate", "score", "train")),
                      f"{r['floor_ratio']:.2f}", f"{r['peak'] / 2**30:.1f}", room and f"< {room:g}"))
    return [table_of(("machine", "faults"), [(machine(), "; ".join(faults) or "none")]), table_of(columns, lines)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the processor")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seconds", type=float, default=240, help="of all cases together")
    parser.add_argument("--out", default=os.environ.get("OUT") or "docs/results")
    parser.add_argument("--child", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--json", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        raise SystemExit("no NVIDIA card that torch can use; --dry-run tries the script on the processor")
    if not options.dry_run:
        measuring.wait = torch.cuda.synchronize
    if options.child:
        child(options.child, options)
        return 0
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict] = []
    faults: list[str] = []
    for name in options.cases:
        found, fault = run(name, options, out)
        rows += found
        faults += [fault] if fault else []
        write_tables(out / "gpu_ppo.md", *tables_of(rows, faults))  # a machine may be taken away
        write_rows(rows, str(out / "gpu_ppo.json"))
    print((out / "gpu_ppo.md").read_text(encoding="utf-8"))
    return int(any("left out" not in fault for fault in faults))


if __name__ == "__main__":
    sys.exit(main())
