"""The largest model that each card holds in PPO with four roles, by --plan; reads no weights and needs no card.

    python benchmarks/cards.py [--json docs/results/cards.json] [--page docs/results/cards.md]

Shapes of the Qwen2.5 and Llama families, written here as configurations. PPO of 8 sequences of 512 + 512 tokens a step,
bf16, gradient checkpointing, micro-batches of 4096, 2048 or 1024 tokens: the largest that fits. 97% of a
card is planned with. lora and qlora: one base, rank 16; full: four models, actor and critic with AdamW; offload: the
same with optimizers and idle roles in the computer's memory, whose size stands beside it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import harness
from harness import parser_of, table_of, write_rows, write_tables

from hybrid_rlhf.core.config import parse
from hybrid_rlhf.memory_plan.amounts import Cards
from hybrid_rlhf.memory_plan.plan import Plan
from hybrid_rlhf.training import memory_options, step3_ppo

CARDS = (8, 12, 16, 24, 48, 80)  # GiB
TOKENS = (4096, 2048, 1024)
# hidden, intermediate, layers, heads, key-value heads, vocabulary, whether the head is the embedding
QWEN = {"0.5B": (896, 4864, 24, 14, 2, 151936, True), "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
        "3B": (2048, 11008, 36, 16, 2, 151936, True), "7B": (3584, 18944, 28, 28, 4, 152064, False),
        "14B": (5120, 13824, 48, 40, 8, 152064, False), "32B": (5120, 27648, 64, 40, 8, 152064, False)}
LLAMA = {"8B": (4096, 14336, 32, 32, 8, 128256, False), "70B": (8192, 28672, 80, 64, 8, 128256, False)}
SHAPES = [*list(QWEN)[:4], "8B", "14B", "32B", "70B"]  # by size
WAYS = {"lora": ["--model.lora.r=16"], "qlora": ["--model.lora.r=16", "--model.load_in_4bit=true"], "full": [],
        "offload": ["--engine.offload=[optimizer]", *(f"--roles.{r}.offload=true" for r in
                                                      ("actor", "ref", "critic", "reward"))]}


def write_shape(name: str, place: Path) -> str:
    """A folder with config.json and nothing else."""
    kind, sizes = ("qwen2", QWEN[name]) if name in QWEN else ("llama", LLAMA[name])
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "vocab_size", "tie_word_embeddings")
    folder = place / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(zip(names, sizes, strict=True)) | {
        "model_type": kind, "max_position_embeddings": 32768}))
    return str(folder)


def plan_of(folder: str, way: str, gib: int, tokens: int) -> Plan:
    """The plan of one row on a card of `gib`."""
    config, _ = parse(step3_ppo.Config, [
        f"--model.model_name_or_path={folder}", f"--roles.reward.model_name_or_path={folder}", "--model.dtype=bfloat16",
        "--model.gradient_checkpointing=true", "--data.max_prompt_length=512", "--ppo.sampling.max_new_tokens=512",
        "--train.per_device_train_batch_size=8", f"--engine.micro_batch_tokens={tokens}", *WAYS[way]], prog="cards")
    plan, = memory_options.plans_of(config, memory_options.Place.of(Cards(1, 1, gib << 30)))
    return plan


def largest(way: str, gib: int, place: Path) -> dict:
    """The row of a card: the largest shape that fits, with the largest micro-batch that does."""
    for name in reversed(SHAPES):
        for tokens in TOKENS if _may_fit(name, way, gib) else ():
            plan = plan_of(write_shape(name, place), way, gib, tokens)
            if plan.short <= 0:
                return {"card_gib": gib, "way": way, "shape": name, "micro_batch_tokens": tokens,
                        "peak_gib": round(plan.peak / 2**30, 2), "phase": plan.peak_phase,
                        "host_gib": round(plan.host / 2**30, 1)}
    return {"card_gib": gib, "way": way, "shape": None}


def _may_fit(name: str, way: str, gib: int) -> bool:
    """Not where half a byte (4 bits) or two of every weight are more than the card: no plan need be made."""
    return float(name[:-1]) * (0.5 if way == "qlora" else 2) < gib * 1.08


def rows(place: Path, cards: Sequence[int]) -> Iterator[dict]:
    for gib in cards:
        for way in WAYS:
            row = largest(way, gib, place)
            print(json.dumps(row), flush=True)
            yield row


def _cell(row: dict) -> str:
    if row["shape"] is None:
        return "none"
    host = f", {row['host_gib']} GiB on the host" if row["host_gib"] else ""
    return f"{row['shape']} ({row['micro_batch_tokens']}; {row['peak_gib']} GiB{host})"


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    options = harness.parse(parser, argv)
    with tempfile.TemporaryDirectory() as folder:
        found = write_rows(rows(Path(folder), CARDS[:1] if options.quick else CARDS), options.json)
    if options.page:
        cells = {gib: [_cell(row) for row in found if row["card_gib"] == gib] for gib in CARDS}
        write_tables(options.page, table_of(["card", *WAYS], [(f"{gib} GiB", *cells[gib]) for gib in cells]))


if __name__ == "__main__":
    main()
