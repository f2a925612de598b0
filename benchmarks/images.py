"""Rollouts with images beside transformers' generate, in turns in one run, and the same without images.

    python benchmarks/images.py [--groups 4] [--samples 8] [--new_tokens 48] [--repeats 5] [--json FILE]

A random Qwen3-VL of 7M parameters in fp32 samples groups of answers to prompts with one picture of 64 tokens; generate
gets the same prompts, all of one length, as its processor makes them, and draws as many tokens.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from harness import Case, add_clock, alternate, parse, parser_of, timed_row, write_rows

from hybrid_rlhf.core.image_files import ImageRef, look_at, open_image
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.models.images import load_reader
from hybrid_rlhf.models.load import ModelConfig, load_causal_lm
from hybrid_rlhf.roles.policy_module import PolicyModule

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "vision"))
CASES = {"images": Case("groups, 7M fp32, one image of 64 tokens each", "generate", 1, None),
         "text": Case("groups, 7M fp32, the same length in text", "generate", 1, None)}
PIXELS = 64  # a side: 64 tokens


def open_model(folder: Path):  # noqa: ANN201
    """The example's model, larger, with its reader."""
    import make_model

    make_model.make(folder, width=256, num_layers=6, pixels=PIXELS)
    return load_causal_lm(ModelConfig(str(folder), dtype="float32")).eval(), load_reader(str(folder))


def pictures(folder: Path, count: int) -> list[ImageRef]:
    from PIL import Image

    for i in range(count):
        Image.new("RGB", (PIXELS, PIXELS), (i * 40 % 256, i * 90 % 256, 120)).save(folder / f"{i}.png")
    return [look_at(str(folder / f"{i}.png")) for i in range(count)]


def measure(name: str, options: argparse.Namespace, folder: Path) -> dict:
    model, reader = open_model(folder / name)
    engine = HybridEngine(PolicyModule(model), model)
    images = [image for image in pictures(folder, options.groups) for _ in range(options.samples)]
    tokenizer = reader._processor.tokenizer
    texts = [f"Describe {reader.placeholder} in a word."] * len(images)
    prompts = [tokenizer(text.replace(reader.placeholder, reader.read(image).text))["input_ids"]
               for text, image in zip(texts, images, strict=True)]
    of_prompts = [(image,) for image in images]
    theirs = dict(reader._processor(text=texts, images=[open_image(image) for image in images], return_tensors="pt"))
    if name == "text":
        prompts = [[5 + i % 200 for i in range(len(ids))] for ids in prompts]
        theirs, of_prompts = {"input_ids": torch.tensor(prompts)}, None
    drawn = SamplingConfig(max_new_tokens=options.new_tokens, temperature=1.0)

    def ours() -> None:
        with engine.inference():
            engine.generate(prompts, drawn, seed=0, images=of_prompts)

    @torch.no_grad()
    def peer() -> None:
        model.generate(**theirs, do_sample=True, max_new_tokens=options.new_tokens, min_new_tokens=options.new_tokens,
                       top_k=0, pad_token_id=0)

    times = alternate(options.repeats, ours, peer)
    return timed_row(name, CASES[name], times, {}, len(prompts) * options.new_tokens, kv_bytes=engine.kv_bytes)


def main(argv: Sequence[str] | None = None) -> None:
    parser = add_clock(parser_of(__doc__, CASES, repeats=5))
    for option, value in (("--groups", 4), ("--samples", 8), ("--new_tokens", 48)):
        parser.add_argument(option, type=int, default=value)
    options = parse(parser, argv)
    with tempfile.TemporaryDirectory() as folder:
        write_rows((measure(name, options, Path(folder)) for name in options.cases), options.json)


if __name__ == "__main__":
    main()
