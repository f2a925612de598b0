"""Generation on a card: our engine beside transformers' generate, alternating in one run, after a check of equality.

    benchmarks/gpu.sh                        the card's tests, then this
    python benchmarks/gpu.py --out FOLDER    gpu.json, gpu.md, gpu_profile.txt
    python benchmarks/gpu.py --dry-run       the same at tiny sizes on the processor, so that nothing is left to a typo

Random weights in bf16, temperature 1, distinct prompts, no stop tokens. `NAME` enters inference mode, captures and
gives the cache back every time, as a training step does; `NAME, in the mode` generates again in the same mode. ours and
peer are milliseconds (tokens per second for the ragged case); ratio > 1: we are better. floor_ratio is the time of one
decode step over the time that reading its weights takes at the measured bandwidth of a copy.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from harness import Case, alternate, measuring, row_of, table_of, write_rows, write_tables
from torch import nn

from hybrid_rlhf.engine.decode.cuda_graphs import called
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.engine.hybrid import HybridEngine

OPT = dict(model_type="opt", hidden_size=2048, word_embed_proj_dim=2048, num_hidden_layers=24, num_attention_heads=32,
           ffn_dim=8192, vocab_size=50272, max_position_embeddings=2048)
LLAMA = dict(model_type="llama", hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
             intermediate_size=8192, vocab_size=128256, max_position_embeddings=4096, tie_word_embeddings=True)
TINY = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=97, max_position_embeddings=128)
TINY_OPT = TINY | dict(model_type="opt", word_embed_proj_dim=32, ffn_dim=64)
TINY_LLAMA = TINY | dict(model_type="llama", num_key_value_heads=2, intermediate_size=64, tie_word_embeddings=True)
GENERATE = "transformers generate"


@dataclass
class Bench:
    """Where and how large. is_dry: tiny, on the processor, whose steps are called and not captured."""

    is_dry: bool
    repeats: int
    out: Path

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.is_dry else "cuda")

    @property
    def capture(self) -> Callable | str:
        return called if self.is_dry else "auto"


# -- models and requests -----------------------------------------------------------------------------------------------


def build(bench: Bench, shape: dict, dtype: torch.dtype) -> nn.Module:
    """A model of random weights, made on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = dict(shape)
    config = AutoConfig.for_model(shape.pop("model_type"), **shape, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    with bench.device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    return model.to(bench.device).eval()


def prompts_of(lengths: Sequence[int], size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, size, (n,), generator=generator).tolist() for n in lengths]


def engine_of(bench: Bench, model: nn.Module, rows: int, is_captured: bool = True) -> HybridEngine:
    return HybridEngine(model, model, max_batch=rows, capture=bench.capture if is_captured else None)


def by_transformers(model: nn.Module, prompts: list[list[int]], limits: list[int], temperature: float,
                    rows: int) -> list[list[int]]:
    """generate in batches of `rows`, padded on the left, each as long as its longest response."""
    device, tokens = next(model.parameters()).device, []
    drawn = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0) if temperature else dict(do_sample=False)
    for start in range(0, len(prompts), rows):
        batch, ends = prompts[start : start + rows], limits[start : start + rows]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in batch], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch], device=device)
        with torch.no_grad():
            out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max(ends), min_new_tokens=max(ends),
                                 pad_token_id=0, **drawn)
        tokens += [row[:n] for row, n in zip(out[:, width:].tolist(), ends, strict=True)]
    return tokens


# -- equality ----------------------------------------------------------------------------------------------------------


def check_equal(bench: Bench) -> list[str]:
    """Greedy tokens in fp32 of both shapes, captured and not, against generate. Returns what differs."""
    faults = []
    for shape in (TINY_OPT, TINY_LLAMA):
        model = build(bench, shape, torch.float32)
        prompts, limits = prompts_of([9, 3, 17, 1, 6], shape["vocab_size"]), [8] * 5
        want = [by_transformers(model, [p], [8], 0.0, 1)[0] for p in prompts]
        for name in ("captured", "uncaptured"):
            engine = engine_of(bench, model, 4, name == "captured")
            with engine.inference():
                drawn = engine.generate(prompts, SamplingConfig(max_new_tokens=8, temperature=0), limits=limits).tokens
            said = engine.describe()
            print(f"{shape['model_type']:8} {name:10} {'equal' if drawn == want else 'DIFFERENT'}  {said}", flush=True)
            if drawn != want or said["captured"] != (name == "captured"):
                faults.append(f"{shape['model_type']} {name}: {said}")
    return faults


# -- speed -------------------------------------------------------------------------------------------------------------


def bandwidth(bench: Bench) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.empty(2**16 if bench.is_dry else 2**31, dtype=torch.uint8, device=bench.device).random_()
    target = torch.empty_like(source)
    (taken,) = alternate(bench.repeats, lambda: [target.copy_(source) for _ in range(10)])
    return 20 * source.numel() / taken.median


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the matrices that a decode step reads, each once."""
    weights = {m.weight.data_ptr(): m.weight for m in model.modules() if isinstance(m, nn.Linear)}
    return sum(w.numel() * w.element_size() for w in weights.values())


def fixed(bench: Bench, name: str, shape: dict, rows: int, prompt: int, response: int, rate: float) -> list[dict]:
    """`rows` prompts of one length, every response `response` tokens."""
    model = build(bench, shape, torch.float32 if bench.is_dry else torch.bfloat16)
    prompts = prompts_of([prompt] * rows, shape["vocab_size"])
    engine = engine_of(bench, model, rows)

    def ours(steps: int = response) -> None:
        engine.generate(prompts, SamplingConfig(max_new_tokens=steps), seed=0)

    def entered() -> None:
        with engine.inference():
            ours()

    whole, peer = medians(bench, entered, lambda: by_transformers(model, prompts, [response] * rows, 1.0, rows))
    with engine.inference():
        ours()
        inside, short = medians(bench, ours, lambda: ours(response // 2))
        if not bench.is_dry:
            profile(bench, ours, name)
    step = (inside - short) / (response - response // 2)
    floor = step * rate / weight_bytes(model)
    print(f"{name}: {engine.describe()}", flush=True)
    return [row_of(case, Case(case, GENERATE), 1000 * ours, 1000 * peer, "ms", floor, machine=machine())
            for case, ours in ((name, whole), (f"{name}, in the mode", inside))]


def medians(bench: Bench, *sides: Callable[[], object]) -> list[float]:
    return [times.median for times in alternate(bench.repeats, *sides)]


def ragged(bench: Bench, shape: dict, count: int, rows: int) -> list[dict]:
    """Prompts of 16 to 128 tokens; lengths geometric with mean 24 and at most 128; useful tokens per second."""
    generator = torch.Generator().manual_seed(2)
    most = 16 if bench.is_dry else 128
    lengths = torch.randint(most // 8, most + 1, (count,), generator=generator).tolist()
    limits = torch.empty(count).geometric_(1 / 24, generator=generator).clamp(1, most).int().tolist()
    model = build(bench, shape, torch.float32 if bench.is_dry else torch.bfloat16)
    prompts, engine = prompts_of(lengths, shape["vocab_size"]), engine_of(bench, model, rows)

    def entered() -> None:
        with engine.inference():
            engine.generate(prompts, SamplingConfig(max_new_tokens=most), seed=0, limits=limits)

    ours, peer = medians(bench, entered, lambda: by_transformers(model, prompts, limits, 1.0, rows))
    useful, name = sum(limits), f"ragged, {count} requests in {rows} slots"
    return [row_of(name, Case(name, GENERATE), useful / ours, useful / peer, "tokens/s", machine=machine())]


def profile(bench: Bench, act: Callable[[], None], name: str) -> None:
    """Where the card's time goes, by kernel, into gpu_profile.txt."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        act()
        measuring.wait()
    with (bench.out / "gpu_profile.txt").open("a", encoding="utf-8") as file:
        print(name, found.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=80),
              file=file)


def machine() -> str:
    import transformers

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no card"
    return f"{name}, torch {torch.__version__}, transformers {transformers.__version__}"


# -- the run -----------------------------------------------------------------------------------------------------------


def cases(bench: Bench, rate: float) -> dict[str, Callable[[], list[dict]]]:
    opt, llama = (TINY_OPT, TINY_LLAMA) if bench.is_dry else (OPT, LLAMA)
    prompt, response = (8, 6) if bench.is_dry else (256, 128)
    return {"opt-1.3b": lambda: fixed(bench, "OPT-1.3B shape, 8 x (256 + 128)", opt, 8, prompt, response, rate),
            "llama-1b": lambda: fixed(bench, "Llama-1B shape, 8 x (256 + 128)", llama, 8, prompt, response, rate),
            "ragged": lambda: ragged(bench, llama, 8 if bench.is_dry else 128, 4 if bench.is_dry else 32)}


def write(bench: Bench, rows: list[dict], rate: float, faults: list[str]) -> None:
    write_rows(rows, str(bench.out / "gpu.json"))
    columns = "case", "ours", "transformers", "ratio", "decode step / its weights at that rate"
    write_tables(
        bench.out / "gpu.md",
        table_of(("machine", "a copy moves", "medians of", "different tokens"),
                 [(machine(), f"{rate / 1e12:.2f} TB/s", bench.repeats, "; ".join(faults) or "none")]),
        table_of(columns, [(r["case"], f"{r['ours']:.1f} {r['unit']}", f"{r['peer']:.1f} {r['unit']}",
                            f"{r['ratio']:.2f}", r["floor_ratio"] and f"{r['floor_ratio']:.2f}") for r in rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the processor")
    parser.add_argument("--cases", nargs="+", default=["opt-1.3b", "llama-1b", "ragged"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", default=os.environ.get("OUT") or "docs/results")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        raise SystemExit("no NVIDIA card that torch can use; --dry-run tries the script on the processor")
    if not options.dry_run:
        measuring.wait = torch.cuda.synchronize
    bench = Bench(options.dry_run, options.repeats, Path(options.out))
    bench.out.mkdir(parents=True, exist_ok=True)
    (bench.out / "gpu_profile.txt").unlink(missing_ok=True)
    faults, rate = check_equal(bench), bandwidth(bench)
    print(f"{machine()}; a copy moves {rate / 1e12:.3f} TB/s", flush=True)
    rows: list[dict] = []
    for name in options.cases:
        rows += cases(bench, rate)[name]()
        write(bench, rows, rate, faults)  # after each, for a machine may be taken away
    print((bench.out / "gpu.md").read_text(encoding="utf-8"))
    if faults:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
