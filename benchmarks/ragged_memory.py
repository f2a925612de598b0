"""Does memory grow over steps of unequal lengths? The peak after step 50 against the peak of all steps.

    python benchmarks/ragged_memory.py [--cases products sft_fp32 ...] [--steps 1000] [--shape tiny] [--quick]
        [--json FILE] [--page FILE]

Each side is a process of its own. `products`: one matrix by 1,500 different numbers of rows, by oneDNN as torch calls
it, with its caches bounded as our entry points do (ours) and as torch has them (peer). `sft_*`, `reward_*`, `ppo_*`:
the stage by the command line itself, on a random Llama of 4M weights and rows of unequal lengths, batches of 4; beside
SFT TRL's SFTTrainer on the same rows, beside the reward model its RewardTrainer, in the same dtype. Our bf16 has fp32
masters, TRL's none. A processor without AVX-512 has no products by oneDNN in bf16, so there the stages show only the
C library's heap, and `products` the rest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from harness import Case, memory_status, parse, parser_of, row_of, run_apart, table_of, write_rows, write_tables
from random_models import SHAPES, make_folders, rows_of, text_of, tokenizer_of

from hybrid_rlhf.core.memory import PRODUCT_CACHES

SHAPE, QUICK_SHAPE = "llama4m", "tiny"
WARM, MOST = 50, 0.05  # steps until the first peak counts, and by how much it may be exceeded later
LENGTHS, BATCH, ROWS = (8, 120), 4, 2000
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
PAY = "def pay(completions, **_):\n    return [float(len(c) % 5) for c in completions]\n"


# -- each in a process of its own --------------------------------------------------------------------------------------


def products(is_bounded: bool, steps: int) -> list[int]:
    """Resident bytes after each product."""
    from hybrid_rlhf.core.memory import bound_product_caches, keep_freed_blocks

    keep_freed_blocks()
    if is_bounded:
        bound_product_caches()
    weight, rows = torch.ones(64, 192), random.Random(0).sample(range(1, 1 + steps), steps)
    sizes = []
    with torch.no_grad():
        for length in rows:
            torch.ops.mkldnn._linear_pointwise(torch.ones(length, 192), weight, None, "none", [], "")
            sizes.append(memory_status("VmRSS"))
    return sizes


def stage(name: str, dtype: str, place: str, steps: int) -> list[int]:
    """The process's peak in each step of a stage, as a user starts it."""
    from hybrid_rlhf.cli import main as command_line
    from hybrid_rlhf.run import loop

    sizes, step = [], loop._step

    def watched(*given: object) -> dict[str, float]:
        values = step(*given)  # whose phases set the mark back, and have read it
        marks = [value for key, value in values.items() if key.startswith("memory/") and key.count("/") == 2]
        sizes.append(int(max([memory_status("VmHWM"), *marks])))
        return values

    loop._step = watched
    if command_line(words(Path(place), name, dtype, steps)):
        raise SystemExit(f"{name} in {dtype} failed; see above")
    return sizes


def words(place: Path, name: str, dtype: str, steps: int) -> list[str]:
    """The command line of a stage."""
    found = ["--stage", name, "--model.model_name_or_path", f"{place}/base", "--model.dtype", DTYPES[dtype],
             f"--data.sources=[{place}/{name}.jsonl]", "--data.raw", "true", "--data.cache_dir", f"{place}/cache",
             "--data.eval_fraction", "0", "--output_dir", f"{place}/runs/{name}_{dtype}", "--train.max_steps",
             str(steps), "--train.per_device_train_batch_size", str(BATCH), "--train.save_steps", "0",
             "--train.num_fixed_prompts", "0", "--train.logging_steps", "100"]
    if name == "ppo":
        found += [f"--reward.functions=[{place}/pay.py:pay]", "--ppo.sampling.max_new_tokens", "24",
                  "--ppo.num_ppo_epochs", "1", "--ppo.num_minibatches", "1"]
    return found


def trl(name: str, dtype: str, place: str, steps: int, vocab: int) -> list[int]:
    """The process's peak in each step of TRL's trainer on the same rows, unpacked as ours."""
    from peers.offline import TrlRaggedSFT, TrlReward

    rows = json.loads((Path(place) / "rows.json").read_text(encoding="utf-8"))[name]
    peer = {"sft": TrlRaggedSFT, "reward": TrlReward}[name]
    trainer = peer(Path(place) / "base", tokenizer_of(vocab), rows, BATCH, Path(place) / "trl",
                   dtype=getattr(torch, DTYPES[dtype]))
    sizes = []
    for _ in range(steps):
        trainer.step()
        sizes.append(memory_status("VmHWM"))
    return sizes


# -- cases -------------------------------------------------------------------------------------------------------------


def write_data(place: Path, vocab: int) -> None:
    """Rows of unequal lengths for every stage: as files, and as ids for TRL."""
    sft = rows_of(ROWS, LENGTHS, vocab, 3)
    sides = rows_of(2 * ROWS, LENGTHS, vocab, 4)
    prompts = rows_of(ROWS, (4, 60), vocab, 5)
    pairs = [(p[:20] + a, p[:20] + b) for p, a, b in zip(prompts, sides[::2], sides[1::2], strict=True)]
    files = {"sft": [{"text": text_of(row)} for row in sft],
             "reward": [{"prompt": text_of(p[:20]), "chosen": text_of(a), "rejected": text_of(b)}
                        for p, a, b in zip(prompts, sides[::2], sides[1::2], strict=True)],
             "ppo": [{"prompt": text_of(row)} for row in prompts]}
    for name, rows in files.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (place / "rows.json").write_text(json.dumps({"sft": sft, "reward": pairs}), encoding="utf-8")
    (place / "pay.py").write_text(PAY, encoding="utf-8")
    tokenizer_of(vocab).save_pretrained(place / "base")


def grown(sizes: Sequence[int]) -> tuple[int, float]:
    """The peak, and by which share it exceeds that of the first steps."""
    peaks = list(itertools.accumulate(sizes, max))
    return peaks[-1], peaks[-1] / peaks[min(WARM, len(peaks)) - 1] - 1


def measured(name: str, options: argparse.Namespace) -> dict:
    if name == "products":
        steps = 100 if options.quick else 1500
        free = dict.fromkeys(PRODUCT_CACHES, "1024")
        ours = run_apart(products, is_bounded=True, steps=steps)
        peer = run_apart(products, free, is_bounded=False, steps=steps)
        ours, peer = ours[WARM:], peer[WARM:]  # a product is no step: both caches fill in the first hundred
    else:
        kind, dtype = name.split("_")
        steps = 3 if options.quick else options.steps
        settings = dict(name=kind, dtype=dtype, place=str(options.place), steps=steps)
        ours = run_apart(stage, **settings)
        peer = run_apart(trl, **settings, vocab=options.vocab) if kind != "ppo" else None
    peak, share = grown(ours)
    others = grown(peer) if peer else (None, None)
    return row_of(name, CASES[name], peak / 1e6, others[0] and others[0] / 1e6, "MB", steps=steps, grown=share,
                  peer_grown=others[1], is_met=share <= MOST, shape=options.shape,
                  every_50th=[s // 10**6 for s in ours[::50]])


CASES = {
    "products": Case("1,500 products of different lengths, oneDNN", "torch's own caches"),
    **{f"{kind}_{dtype}": Case(f"{kind}, rows of unequal lengths, {dtype}", beside) for kind, beside in (
        ("sft", "TRL SFTTrainer"), ("reward", "TRL RewardTrainer"), ("ppo", "")) for dtype in DTYPES},
}


def table(rows: Sequence[dict]) -> str:
    def change(share: float | None) -> str | None:
        return None if share is None else f"{share:+.1%}"

    return table_of(
        ("case", "model", "steps", "peak, MB", f"grown after step {WARM}", f"at most {MOST:.0%}", "beside",
         "its peak, MB", "grown"),
        [(row["work"], "" if row["case"] == "products" else row["shape"], row["steps"], f"{row['ours']:.0f}",
          change(row["grown"]), "met" if row["is_met"] else "missed", row["beside"],
          row["peer"] and f"{row['peer']:.0f}", change(row["peer_grown"])) for row in rows])


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, CASES)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--shape", choices=SHAPES, default=SHAPE, help="of the stages' model (random_models.py)")
    parser.add_argument("--page", help="put the table into this page, or make it")
    options = parse(parser, argv)
    options.shape = QUICK_SHAPE if options.quick else options.shape
    options.vocab = SHAPES[options.shape][1]["vocab_size"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        options.place = Path(folder)
        make_folders(options.shape, options.place, has_reward=False)
        write_data(options.place, options.vocab)
        run: Callable[[str], dict] = lambda name: measured(name, options)  # noqa: E731
        rows = write_rows(map(run, options.cases), options.json)
    if options.page:
        write_tables(Path(options.page), table(rows))
    return int(not all(row["is_met"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
