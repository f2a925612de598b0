"""Every causal-LM type of transformers over two ranks, at tiny size: which run, which are refused, and why.

    python benchmarks/tensor_parallel.py [--json FILE] [--markdown FILE] [--only TYPE ...]

Two processes on this machine hold the same random weights and draw together, five ragged prompts over three slots, in
fp32. Compared with the plain forward of the whole model, for every token that was drawn, are its log-probabilities. The
share of the cache is that of one rank over that of one process. Exit code 1 if a type that runs is wrong.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import torch
import torch.distributed as dist
from tiny_configs import all_types, tiny_model

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import RankGroup, consecutive_ranks
from hybrid_rlhf.engine import HybridEngine, SamplingConfig

PROMPTS = [[(3 + 7 * i + 5 * j * j) % 90 + 5 for j in range(n)] for i, n in enumerate((7, 1, 9, 2, 5))]
SAMPLED = SamplingConfig(max_new_tokens=8)
BOUND = 1e-4  # nats, fp32


def examine(name: str, ranks: RankGroup) -> dict:
    """One type, on this rank; the row of the first rank is the one that is kept."""
    row = {"type": name, "result": "refused", "reason": "", "difference": None, "cache_share": None}
    try:
        model = tiny_model(name)
    except Exception as error:
        return row | {"result": "not built", "reason": _first_line(error)}
    try:
        engine, alone = (HybridEngine(model, model, eos_ids=[2], max_batch=3, tp=tp) for tp in (ranks, None))
        with engine.inference():
            drawn = engine.generate(PROMPTS, SAMPLED, seed=1)
        with alone.inference():
            alone.generate(PROMPTS, SAMPLED, seed=1)
    except (UserError, RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        return row | {"reason": _first_line(error)}
    worst = 0.0
    for prompt, tokens, logprobs in zip(PROMPTS, drawn.tokens, drawn.logprobs, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        truth = logits.double().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(worst, float((torch.tensor(logprobs).double() - truth).abs().max()))
    return row | {"result": "runs" if worst < BOUND else "wrong", "difference": worst,
                  "cache_share": round(engine.kv_bytes / alone.kv_bytes, 3) if alone.kv_bytes else None}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


def work(rank: int, folder: Path, types: list[str]) -> None:
    """One rank: a group of its own for each type, for a type that fails ends its group."""
    import transformers

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=60))
    with (folder / f"{rank}.jsonl").open("w", encoding="utf-8") as out:
        for name in types:
            row = examine(name, consecutive_ranks(2))
            out.write(json.dumps(row) + "\n")
            out.flush()
            if rank == 0:
                print(f"{name}: {row['result']} {row['difference']} {row['cache_share']} {row['reason']}",
                      file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()


def versions() -> dict[str, str]:
    import transformers

    return {"transformers": transformers.__version__, "torch": torch.__version__, "python": platform.python_version()}


def table(rows: list[dict]) -> str:
    """The report as Markdown; types without a plan are counted and named in one line."""
    found = Counter(row["result"] for row in rows)
    without = [row["type"] for row in rows if "no tensor-parallel plan" in row["reason"]]
    lines = ["# Tensor parallelism over two ranks", "", "Made by `python benchmarks/tensor_parallel.py`: tiny random "
             "models in fp32, gloo. Difference: largest |log-probability", "drawn with - plain forward's| in nats. "
             "Cache: a rank's share of what one process holds.", "",
             ", ".join(f"{name} {value}" for name, value in versions().items()), "",
             f"**{found['runs']} types run, {found['wrong']} wrong**, {found['refused']} refused ({len(without)} of "
             f"them because transformers has no plan), {found['not built']} not built at tiny size.", "",
             "| type | result | difference | cache | reason |", "|---|---|---|---|---|"]
    for row in rows:
        if row["type"] not in without and row["result"] != "not built":
            difference = "" if row["difference"] is None else f"{row['difference']:.1e}"
            share = "" if row["cache_share"] is None else row["cache_share"]
            lines.append(f"| {row['type']} | {row['result']} | {difference} | {share} | "
                         f"{row['reason'].replace('|', '/')} |")
    return "\n".join([*lines, "", f"Without a plan: {', '.join(without)}."]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write rows and versions there")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--only", nargs="*", help="types (default: all)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    types = options.only or all_types()
    if options.rank is not None:
        work(options.rank, options.folder, types)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--folder", folder, "--only", *types, "--rank"]
        running = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
        codes = [process.wait() for process in running]
        rows = [json.loads(line) for line in (Path(folder) / "0.jsonl").read_text(encoding="utf-8").splitlines()]
    if options.json:
        options.json.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(table(rows), encoding="utf-8")
    print(Counter(row["result"] for row in rows))
    return int(any(codes) or any(row["result"] == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
