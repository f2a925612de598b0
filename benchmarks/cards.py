"""The largest model that each card holds in PPO with four roles, by --plan; reads no weights and needs no card.

    python benchmarks/cards.py [--json docs/results/cards.json] [--page docs/results/cards.md]
    python benchmarks/cards.py --times docs/results/cards_time.md

--times: predicted seconds and memory of steps that others have published, or that are to be reached, in place of it.

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
from typing import NamedTuple

import harness
from harness import parser_of, table_of, write_rows, write_tables

from hybrid_rlhf.core.config import parse
from hybrid_rlhf.memory_plan.amounts import Cards
from hybrid_rlhf.memory_plan.plan import Plan
from hybrid_rlhf.memory_plan.rates import CARDS as KNOWN
from hybrid_rlhf.memory_plan.rates import rates_of_card
from hybrid_rlhf.training import memory_options, step1_sft, step3_ppo

CARDS = (8, 12, 16, 24, 48, 80)  # GiB
TOKENS = (4096, 2048, 1024)
# hidden, intermediate, layers, heads, key-value heads, vocabulary, whether the head is the embedding
QWEN = {"0.5B": (896, 4864, 24, 14, 2, 151936, True), "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
        "3B": (2048, 11008, 36, 16, 2, 151936, True), "7B": (3584, 18944, 28, 28, 4, 152064, False),
        "14B": (5120, 13824, 48, 40, 8, 152064, False), "32B": (5120, 27648, 64, 40, 8, 152064, False)}
QWEN3 = {"1.7B": (2048, 6144, 28, 16, 8, 151936, True), "4B": (2560, 9728, 36, 32, 8, 151936, True),
         "8B": (4096, 12288, 36, 32, 8, 151936, False)}
LLAMA = {"8B": (4096, 14336, 32, 32, 8, 128256, False), "70B": (8192, 28672, 80, 64, 8, 128256, False)}
SHAPES = [*list(QWEN)[:4], "8B", "14B", "32B", "70B"]  # by size
WAYS = {"lora": ["--model.lora.r=16"], "qlora": ["--model.lora.r=16", "--model.load_in_4bit=true"], "full": [],
        "offload": ["--engine.offload=[optimizer]", *(f"--roles.{r}.offload=true" for r in
                                                      ("actor", "ref", "critic", "reward"))]}
LORA, QLORA = ([*WAYS[way], "--model.gradient_checkpointing=true"] for way in ("lora", "qlora"))


class Step(NamedTuple):
    """A step whose seconds and memory are predicted. model: family and size; options: of its command; known: what has
    been published, measured or aimed at."""

    work: str
    model: tuple[dict, str]
    card: str
    options: list[str]
    known: str


def _grpo(prompts: int, samples: int, prompt: int, response: int, *more: str) -> list[str]:
    return ["--stage=grpo", f"--train.per_device_train_batch_size={prompts}", f"--ppo.sampling.num_samples={samples}",
            f"--data.max_prompt_length={prompt}", f"--ppo.sampling.max_new_tokens={response}", "--ppo.num_ppo_epochs=1",
            "--ppo.num_minibatches=1", "--reward.functions=builtin:repetition_penalty", *more]


_TRL = "TRL, a notebook"
STEPS = [
    Step("GRPO, Qwen2.5-0.5B, all weights, 64 x (256 + 256)", (QWEN, "0.5B"), "h100", _grpo(8, 8, 256, 256),
         "measured 1.06 to 1.30 s, 19.8 GiB of tensors (17.4 of ours), decode step 1.74 ms (gpu.md); aim 1.1 s, 1.6"),
    Step("GRPO, Llama-8B, LoRA, 16 x (512 + 512)", (LLAMA, "8B"), "h100", _grpo(2, 8, 512, 512, *LORA),
         "aim: decode step 7 ms"),
    Step("GRPO, Llama-8B, LoRA, 64 x (512 + 512)", (LLAMA, "8B"), "h100", _grpo(8, 8, 512, 512, *LORA),
         "aim: 11 s, what a trainer beside vLLM takes; decode step 10.5 ms"),
    Step("GRPO, Llama-8B, QLoRA, 16 x (512 + 512)", (LLAMA, "8B"), "h100", _grpo(2, 8, 512, 512, *QLORA),
         "aim: decode step 4.5 ms"),
    *(Step(f"GRPO, Qwen3-{size}, QLoRA, 32 x (128 + 96)", (QWEN3, size), "3070",
           _grpo(4, 8, 128, 96, *QLORA, "--engine.micro_batch_tokens=1792"), f"{_TRL}: {known}") for size, known in
      (("1.7B", "15.9 s, 2.7 GiB"), ("4B", "20.5 s, 4.1 GiB"), ("8B", "25.8 s, 7.4 GiB"))),
    Step("SFT, Qwen3-4B, LoRA, one row of 16,384", (QWEN3, "4B"), "h100",
         ["--stage=sft", "--train.per_device_train_batch_size=1", "--data.max_length=16384", *LORA],
         "prime-rl's trainer: 6,200 tokens/s (2.6 s), 23.3 GiB"),
]


def write_shape(name: str, place: Path) -> str:
    """A folder with config.json and nothing else."""
    return write_config(*((QWEN, name) if name in QWEN else (LLAMA, name)), place)


def write_config(family: dict, name: str, place: Path) -> str:
    """As `write_shape`, of one family."""
    kind, sizes = {id(QWEN): "qwen2", id(QWEN3): "qwen3", id(LLAMA): "llama"}[id(family)], family[name]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "vocab_size", "tie_word_embeddings")
    folder = place / f"{kind}-{name}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(zip(names, sizes, strict=True)) | {
        "model_type": kind, "max_position_embeddings": 32768} | ({"head_dim": 128} if kind == "qwen3" else {})))
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


def times(place: Path) -> Iterator[tuple]:
    """A line of the second page for each of STEPS."""
    for work, model, name, options, known in STEPS:
        folder, kind = write_config(*model, place), step1_sft if "--stage=sft" in options else step3_ppo
        estimator = ["--ppo.estimator=grpo"] if kind is step3_ppo else []
        config, _ = parse(kind.Config, [f"--model.model_name_or_path={folder}", "--model.dtype=bfloat16",
                                        *estimator, *options[1:]], prog="cards")
        card = KNOWN[name]
        there = memory_options.Place.of(Cards(1, 1, card.gib << 30, name))
        plan, = memory_options.plans_of(config, there)
        time = memory_options.times_of(plan, there.device, rates_of_card(card))
        decode, floor = time.decode or (0.0, 1.0)
        yield (work, card.name, f"{time.whole:.2f}", f"{plan.peak / 2**30:.1f}" + " (does not fit)" * (plan.short > 0),
               f"{1000 * decode:.2f}" if decode else "", f"{decode / floor:.2f}" if decode else "", known,
               f"`{' '.join(options)}`")


def _cell(row: dict) -> str:
    if row["shape"] is None:
        return "none"
    host = f", {row['host_gib']} GiB on the host" if row["host_gib"] else ""
    return f"{row['shape']} ({row['micro_batch_tokens']}; {row['peak_gib']} GiB{host})"


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    parser.add_argument("--times", type=Path, help="predict STEPS in place of it, and put them into this page")
    options = harness.parse(parser, argv)
    if options.times:
        with tempfile.TemporaryDirectory() as folder:
            write_tables(options.times, table_of(["work", "card", "step, s", "peak, GiB", "decode step, ms",
                                                  "over its floor", "known", "options"], list(times(Path(folder)))))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = write_rows(rows(Path(folder), CARDS[:1] if options.quick else CARDS), options.json)
    if options.page:
        cells = {gib: [_cell(row) for row in found if row["card_gib"] == gib] for gib in CARDS}
        write_tables(options.page, table_of(["card", *WAYS], [(f"{gib} GiB", *cells[gib]) for gib in cells]))


if __name__ == "__main__":
    main()
