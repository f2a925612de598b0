"""Every causal-LM type of transformers over two ranks, at tiny size: which run, which are refused, and why.

    python benchmarks/tensor_parallel.py [--json FILE] [--page FILE] [--only TYPE ...]

Two processes on this machine hold the same random weights and draw together, five ragged prompts over three slots, in
fp32. Compared with the plain forward of the whole model, for every token that was drawn, are its log-probabilities. The
share of the cache is that of one rank over that of one process. Exit code 1 if a type that runs is wrong.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from harness import parse, parser_of, table_of, write_rows, write_tables
from tiny_configs import PROMPTS, all_types, first_lines, tiny_model, versions

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import RankGroup, consecutive_ranks
from hybrid_rlhf.engine import HybridEngine, SamplingConfig

SAMPLED = SamplingConfig(max_new_tokens=8)
BOUND = 1e-4  # nats, fp32


def examine(name: str, ranks: RankGroup) -> dict:
    """One type, on this rank; the row of the first rank is the one that is kept."""
    row = {"type": name, "result": "refused", "reason": "", "difference": None, "cache_share": None}
    try:
        model = tiny_model(name)
    except Exception as error:
        return row | {"result": "not built", "reason": first_lines(error, 300)}
    try:
        engine, alone = (HybridEngine(model, model, eos_ids=[2], max_batch=3, tp=tp) for tp in (ranks, None))
        with engine.inference():
            drawn = engine.generate(PROMPTS, SAMPLED, seed=1)
        with alone.inference():
            alone.generate(PROMPTS, SAMPLED, seed=1)
    except (UserError, RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        return row | {"reason": first_lines(error, 300)}
    worst = 0.0
    for prompt, tokens, logprobs in zip(PROMPTS, drawn.tokens, drawn.logprobs, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        truth = logits.double().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(worst, float((torch.tensor(logprobs).double() - truth).abs().max()))
    return row | {"result": "runs" if worst < BOUND else "wrong", "difference": worst,
                  "cache_share": round(engine.kv_bytes / alone.kv_bytes, 3) if alone.kv_bytes else None}


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


def tables_of(rows: list[dict]) -> list[str]:
    """What they come to, and the types; those without a plan or a tiny model are in the first table alone."""
    results = Counter(row["result"] for row in rows)
    without = [row["type"] for row in rows if "no tensor-parallel plan" in row["reason"]]
    about = versions() | {name: results[name] for name in ("runs", "wrong", "refused", "not built")} | {
        "of the refused without a plan in transformers": f"{len(without)}: {', '.join(without)}"}
    shown = [row for row in rows if row["type"] not in without and row["result"] != "not built"]
    return [table_of(("of all types", ""), about.items()), table_of(
        ("type", "result", "difference", "cache", "reason"), [(
            row["type"], row["result"], None if row["difference"] is None else f"{row['difference']:.1e}",
            row["cache_share"], row["reason"]) for row in shown])]


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    parser.add_argument("--only", nargs="*", help="types (default: all)")
    options = parse(parser, argv)
    types = options.only or (["llama", "bloom", "qwen2"] if options.quick else all_types())
    with tempfile.TemporaryDirectory() as folder:
        ranks = [multiprocessing.get_context("spawn").Process(target=work, args=(rank, Path(folder), types))
                 for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        rows = [json.loads(line) for line in (Path(folder) / "0.jsonl").read_text(encoding="utf-8").splitlines()]
    write_rows(rows, options.json)
    if options.page:
        write_tables(options.page, *tables_of(rows))
    print(Counter(row["result"] for row in rows))
    return int(any(rank.exitcode for rank in ranks) or any(row["result"] == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
