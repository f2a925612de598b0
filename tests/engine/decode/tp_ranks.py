"""One rank of a tensor-parallel group of two, for test_tensor_parallel.py: python tp_ranks.py RANK STORE OUT.json

Runs every case and writes what it saw; the test judges.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import consecutive_ranks
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.decode.runner import Runner
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from tests.factories.architectures import build
from tests.factories.decoding import GREEDY, PROMPTS

KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe")
SAMPLED = SamplingConfig(max_new_tokens=8, temperature=0.8, top_k=50, repetition_penalty=1.1)


def changes_of(kind: str) -> dict:
    return {"tie_word_embeddings": kind == "qwen2", **({"attention_bias": True} if kind == "qwen3" else {})}


def engine_of(model, ranks=None):
    return HybridEngine(model, model, eos_ids=[2], max_batch=3, tp=ranks)


def with_adapters(model):
    """LoRA of every layer, with branches that say something."""
    torch.manual_seed(7)
    add_lora(model, LoraConfig(r=4))
    for name, up in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(up, std=0.3)
    return model


def step(model) -> None:
    """One SGD step on the adapters."""
    model.train()
    ids = torch.tensor([PROMPTS[2]])
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3).step()
    model.zero_grad()
    model.eval()


def first_logits(engine) -> list:
    """The logits of the first step after PROMPTS[0]."""
    seen, true_decode = [], Runner.decode

    def decode(self, *given, **named):
        seen.append(true_decode(self, *given, **named))
        return seen[-1]

    Runner.decode = decode
    try:
        engine.generate(PROMPTS[:1], SamplingConfig(max_new_tokens=1))
    finally:
        Runner.decode = true_decode
    return seen[0][0].tolist()


def shards(model, storages: dict) -> dict:
    """How many weights there are in the mode, and how many of them lie in no training parameter's storage."""
    weights = list(model.parameters())
    strangers = [w for w in weights if w.untyped_storage().data_ptr() not in storages]
    return {"numel": sum(w.numel() for w in weights), "strangers": len(strangers)}


def architecture(kind: str, ranks, rank: int) -> dict:
    model = build(kind, **changes_of(kind))
    engine = engine_of(model, ranks)
    before = {n: (p, p.detach().clone()) for n, p in model.named_parameters()}
    storages = {p.untyped_storage().data_ptr(): None for p in model.parameters()}
    with engine.inference():
        seen = shards(model, storages)
        greedy = engine.generate(PROMPTS, GREEDY).tokens
        own = list(range(rank, len(PROMPTS), 2))  # each rank its own prompts: three and two
        sampled = engine.generate([PROMPTS[i] for i in own], SAMPLED, seed=5, numbers=own)
        logits = first_logits(engine)
    after = dict(model.named_parameters())
    return {"greedy": greedy, "own": own, "sampled": sampled.tokens, "logprobs": sampled.logprobs, "logits": logits,
            "kv_bytes": engine.kv_bytes, "said": engine.describe(), **seen,
            "is_restored": after.keys() == before.keys() and all(
                after[n] is p and torch.equal(p, bits) for n, (p, bits) in before.items())}


def in_bfloat16(ranks) -> dict:
    engine = engine_of(build("qwen3", **changes_of("qwen3")).bfloat16(), ranks)
    with engine.inference():
        return {"logits": first_logits(engine), "tokens": engine.generate(PROMPTS, SAMPLED, seed=5).tokens}


def adapted(kind: str, ranks) -> dict:
    model = with_adapters(build(kind))
    engine = engine_of(model, ranks)
    tokens = []
    for _ in range(2):
        with engine.inference():
            tokens.append(engine.generate(PROMPTS, GREEDY).tokens)
        step(model)
    return {"tokens": tokens, "weights": sum(float(p.detach().double().sum()) for p in model.parameters())}


def refusals(ranks, rank: int) -> dict:
    """What is said of what cannot be done, on this rank."""
    said = {}

    def note(name, run):
        try:
            run()
            said[name] = None
        except UserError as error:
            said[name] = str(error)

    note("no plan", lambda: engine_of(build("gpt2"), ranks))
    odd = dict(hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
    note("heads", lambda: engine_of(build("llama", **odd), ranks))
    strange = build("llama")
    strange._tp_plan = {"model.norm": "sequence_parallel"}
    note("style", lambda: engine_of(strange, ranks))
    engine = engine_of(build("llama"), ranks)
    with engine.inference():
        long = [PROMPTS[0] * 40] if rank else PROMPTS
        note("too long on one rank", lambda: engine.generate(long, GREEDY))
        note("settings differ", lambda: engine.generate(PROMPTS, SamplingConfig(max_new_tokens=4 + rank)))
        said["afterwards"] = engine.generate(PROMPTS, GREEDY).tokens
        said["nothing to ask for"] = len(engine.generate([] if rank else PROMPTS, GREEDY))
    return said


def failure(ranks, rank: int) -> dict:
    """One rank fails in the middle of a response: the other must not wait for it."""
    engine = engine_of(build("llama"), ranks)
    said, true_decode = {}, Runner.decode
    with engine.inference():
        if rank:
            calls = iter(range(100))

            def decode(self, *given, **named):
                if next(calls) == 3:
                    raise MemoryError("no room on this rank")
                return true_decode(self, *given, **named)

            Runner.decode = decode
        start = time.monotonic()
        for name in ("first", "second"):
            try:
                engine.generate(PROMPTS, GREEDY)
            except (MemoryError, RuntimeError) as error:
                said[name] = f"{type(error).__name__}: {error}"
    return {**said, "seconds": time.monotonic() - start}


def main() -> None:
    rank, store, out = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    ranks = consecutive_ranks(2)
    seen = {kind: architecture(kind, ranks, rank) for kind in KINDS}
    seen |= {f"{kind}+lora": adapted(kind, ranks) for kind in ("llama", "phi3", "mixtral")}
    seen["bfloat16"] = in_bfloat16(ranks)
    seen["refusals"] = refusals(ranks, rank)
    seen["failure"] = failure(ranks, rank)
    out.write_text(json.dumps(seen), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
