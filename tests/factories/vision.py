"""Image-text checkpoints as published, tiny, with small images, and prompts rendered by transformers' own processor."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch

from hybrid_rlhf.core.image_files import ImageRef, look_at
from hybrid_rlhf.models.images import ImageReader, load_reader
from hybrid_rlhf.models.load import ModelConfig, load_causal_lm
from tests.factories import checkpoints

# three axes of positions and features of layers; states; masks of their own, embeddings in each layer
KINDS = ("qwen3_vl", "qwen3_5", "gemma3", "gemma4")
SIZES = ((24, 40), (32, 32), (16, 24))  # width, height
# {0}: the first image; the rows of a batch, with the images of each; the last is shorter than Gemma's window
ROWS = (("hello {0} what", (0,)), ("{0} and {1} x", (1, 0)), ("just text here and more", ()), ("hello {0} what", (2,)),
        ("{0} x", (1,)))


@cache
def folder(kind: str) -> str:
    """A checkpoint whose smallest image has few tokens, and whose windows are longer than some rows."""
    path = Path(checkpoints.write(kind, mkdtemp(prefix=kind)))
    for name, section, key, value in (("preprocessor_config.json", "size", "shortest_edge", 64),
                                      ("processor_config.json", "image_processor", "max_soft_tokens", 70),
                                      ("config.json", "text_config", "sliding_window", 16)):
        settings = json.loads((path / name).read_text()) if (path / name).exists() else {}
        if key in settings.get(section, {}):
            settings[section][key] = value
            (path / name).write_text(json.dumps(settings))
    return str(path)


@cache
def image_files() -> tuple[ImageRef, ...]:
    from PIL import Image

    place, random = Path(mkdtemp(prefix="images")), np.random.RandomState(0)
    for i, (width, height) in enumerate(SIZES):
        Image.fromarray((random.rand(height, width, 3) * 255).astype("uint8")).save(place / f"{i}.png")
    return tuple(look_at(str(place / f"{i}.png")) for i in range(len(SIZES)))


def plain_picture(like: ImageRef, colour: str) -> ImageRef:
    """One of the same size, in a file beside it."""
    from PIL import Image

    path = like.path.replace(".png", f"_{colour}.png")
    Image.new("RGB", (like.width, like.height), colour).save(path)
    return like._replace(path=path)


def image_text_model(kind: str) -> torch.nn.Module:
    return load_causal_lm(ModelConfig(folder(kind), dtype="float32")).eval()


def by_transformers(reader: ImageReader, text: str, images: tuple[ImageRef, ...]) -> dict:
    """The inputs of one row by transformers' processor. text: with {0} for the first image."""
    from PIL import Image

    opened = [Image.open(image.path).convert("RGB") for image in images]
    shown = text.format(*[reader.placeholder] * len(images))
    return dict(reader._processor(text=[shown], images=opened or None, return_tensors="pt"))


def by_generate(model: torch.nn.Module, reader: ImageReader, inputs: dict, count: int) -> list[int]:
    """The greedy tokens of transformers' generate behind the inputs of one row."""
    out = model.generate(**inputs, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0,
                         suppress_tokens=sorted(reader.never))
    return out[0, inputs["input_ids"].shape[1]:].tolist()


def rows_of(kind: str) -> tuple[list[list[int]], list[tuple[ImageRef, ...]]]:
    """Token ids and images of ROWS."""
    reader, files = load_reader(folder(kind)), image_files()
    images = [tuple(files[i] for i in which) for _, which in ROWS]
    texts = [text.format(*(reader.read(image).text for image in row))
             for (text, _), row in zip(ROWS, images, strict=True)]
    return [reader._processor.tokenizer(text)["input_ids"] for text in texts], images


def greedy_chat(path: str, messages: list[dict], images: list[str], count: int) -> tuple[str, int]:
    """The greedy answer of transformers' generate to messages in parts, with the template and the processor of the
    checkpoint, and the tokens of the prompt. images: paths, in their order."""
    from PIL import Image
    from transformers import AutoTokenizer

    model, reader = load_causal_lm(ModelConfig(path, dtype="float32")).eval(), load_reader(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = dict(reader._processor(text=[text], images=[Image.open(image).convert("RGB") for image in images] or None,
                                    return_tensors="pt", add_special_tokens=False))
    said = by_generate(model, reader, inputs, count)
    return (tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False),
            inputs["input_ids"].shape[1])
