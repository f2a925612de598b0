"""Models of random weights, a tokenizer and rows, made on the spot: nothing is fetched."""

from __future__ import annotations

import gc
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from hybrid_rlhf.commands.qualification.findings import Task
from hybrid_rlhf.commands.qualification.speed import TINY, half_of
from hybrid_rlhf.core import own_files
from hybrid_rlhf.data.chat import CHATML
from hybrid_rlhf.models.load import random_model
from hybrid_rlhf.models.tokenizer import train_tokenizer

_QWEN = {"vocab_size": 151936, "max_position_embeddings": 4096, "num_key_value_heads": 2, "tie_word_embeddings": True}
# name: (parameters, transformers' model_type, settings). Of Qwen2.5, and a smaller one for what trains all weights.
MODELS = {
    "Qwen2.5-3B shape": (3.09e9, "qwen2", _QWEN | dict(hidden_size=2048, intermediate_size=11008,
                                                       num_hidden_layers=36, num_attention_heads=16)),
    "Qwen2.5-1.5B shape": (1.54e9, "qwen2", _QWEN | dict(hidden_size=1536, intermediate_size=8960,
                                                         num_hidden_layers=28, num_attention_heads=12)),
    "Qwen2.5-0.5B shape": (0.49e9, "qwen2", _QWEN | dict(hidden_size=896, intermediate_size=4864,
                                                         num_hidden_layers=24, num_attention_heads=14)),
    "Llama-134M shape": (0.134e9, "llama", dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
                                                num_attention_heads=12, num_key_value_heads=12, vocab_size=32000,
                                                max_position_embeddings=4096)),
    "tiny Qwen2": (1e5, "qwen2", TINY)}
WORDS = ["red", "blue", "green", "sea", "cat", "dog", "fox", "sun", "moon", "tree", "old", "book", "river", "stone"]
REWARD = "def shorter(completions):\n    return [1 / (1 + len(text)) for text in completions]\n"
GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """Of one step: rows, tokens of a prompt and of a response."""

    rows: int = 8
    prompt: int = 128
    response: int = 128


DRY_SIZES = Sizes(4, 40, 8)


def choose_model(task: Task, per_parameter: float, on_disk: float, smallest: str, largest: str) -> tuple[str, str]:
    """The largest of MODELS between both that fits what is free on the card (bytes of a parameter, and 1.5 GiB for what
    is not the model's) and on the disk (bytes of a parameter); if none does, ("", why)."""
    if task.is_dry:
        return "tiny Qwen2", ""
    names = list(MODELS)
    memory = 0.95 * torch.cuda.mem_get_info(task.device)[0] - 1.5 * GIB
    disk = shutil.disk_usage(task.folder).free - GIB
    for name in names[names.index(largest) : names.index(smallest) + 1]:
        count = MODELS[name][0]
        if count * per_parameter <= memory and count * on_disk <= disk:
            return name, ""
    count = MODELS[smallest][0]
    if count * on_disk > disk:
        return "", f"the disk is too full: {on_disk * count / GIB + 1:.0f} GiB are needed in {task.folder}"
    return "", f"too little of the card is free: {count * per_parameter / GIB + 1.5:.1f} GiB are needed"


def make_model(task: Task, name: str) -> Path:
    """The folder of the model of that name, made if it is not there: weights of the card's 16-bit type, a tokenizer."""
    folder = task.folder / name.replace(" ", "-")
    if folder.exists():
        return folder
    _, kind, shape = MODELS[name]
    tokenizer = train_tokenizer([" ".join(WORDS)] * 4, 300)
    tokenizer.chat_template = CHATML
    ids = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    on_card = task.device.type == "cuda" and not task.is_dry  # drawing a billion numbers takes a processor a minute
    with torch.device(task.device if on_card else "cpu"):
        model = random_model(kind, shape | ids, 0, half_of(task))
    with own_files.fresh_folder(task.folder) as made:
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        made.rename(folder)
    del model
    gc.collect()
    if task.device.type == "cuda":
        torch.cuda.empty_cache()
    return folder


def make_rows(task: Task, tokenizer_folder: Path, sizes: Sizes) -> None:
    """prompts.jsonl, pairs.jsonl and rewards.py in the part's folder. Prompts are nearly as long as may be."""
    from hybrid_rlhf.models.tokenizer import load_tokenizer

    tokenizer, random = load_tokenizer(str(tokenizer_folder)), torch.Generator().manual_seed(2)
    room = sizes.prompt - len(tokenizer("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")["input_ids"]) - 2
    prompts = []
    for number in range(4 * sizes.rows):
        text = str(number)
        while True:
            longer = f"{text} {WORDS[int(torch.randint(len(WORDS), (1,), generator=random))]}"
            if len(tokenizer(longer)["input_ids"]) > room:
                break
            text = longer
        prompts.append(text)
    pairs = [{"prompt": p, "chosen": "a small red fox", "rejected": "no"} for p in prompts]
    for name, rows in (("prompts", [{"prompt": p} for p in prompts]), ("pairs", pairs)):
        (task.folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    (task.folder / "rewards.py").write_text(REWARD, encoding="utf-8")
