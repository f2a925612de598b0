"""The chat templates that TRL ships, each with a tokenizer that knows its markers, and conversations to try them on."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from tests.factories.tiny import tiny_tokenizer

# family -> (bos, eos) of the models it comes from; the first that a template's name begins with
FAMILIES = {
    "cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "diffusion_gemma": ("<bos>", "<eos>"), "gemma": ("<bos>", "<eos>"), "glm4moe": (None, "<|endoftext|>"),
    "gptoss": ("<|startoftext|>", "<|return|>"), "idefics3": ("<|begin_of_text|>", "<|end_of_text|>"),
    "lfm2": ("<|startoftext|>", "<|im_end|>"), "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "llava_next": ("<s>", "</s>"), "muse_glimmer": ("<|begin_of_text|>", "<|eot|>"), "nemotron": ("<s>", "<|im_end|>"),
    "phi3": ("<s>", "<|endoftext|>"), "qwen": (None, "<|im_end|>"), "smolvlm": ("<|im_start|>", "<end_of_utterance>"),
}
_MARKER = re.compile(r"<\|\"\|>|<\|[A-Za-z_0-9]+\|?>|<[A-Za-z_0-9]+\|>|<｜[^｜'\"]+｜>|<(?:start|end)_of_\w+>|</s>")

USER, SAID = ("What is red?", "And who is kind?", "Which one runs?"), ("A fox.", "You are.", "The dog runs.")
SYSTEM = "Answer in few words."
TURNS = [m for u, a in zip(USER, SAID, strict=True) for m in (
    {"role": "user", "content": u}, {"role": "assistant", "content": a})]
THOUGHTS = [{**m, "content": f"<think>\nSo {i}.\n</think>\n\n{m['content']}"} if m["role"] == "assistant" else m
            for i, m in enumerate(TURNS)]
TOOLS = [{"type": "function", "function": {
    "name": "weather_of", "description": "Tells the weather.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "Which city"}},
        "required": ["city"]}}}]
CALL = {"type": "function", "id": "call12345", "function": {"name": "weather_of", "arguments": {"city": "Oslo"}}}
CALLS = [{"role": "user", "content": "How warm is it?", "tools": TOOLS},
         {"role": "assistant", "content": "", "tool_calls": [CALL]},
         {"role": "tool", "name": "weather_of", "tool_call_id": "call12345", "content": "7 degrees"},
         {"role": "assistant", "content": "It is cold."}]
CONVERSATIONS = {"one turn": TURNS[:2], "three turns": TURNS, "system": [{"role": "system", "content": SYSTEM}, *TURNS],
                 "thoughts": THOUGHTS, "tools": CALLS}


def names(training: bool = False) -> list[str]:
    """Every template but those for training, which TRL swaps in for a loss mask of its own; or these."""
    return sorted(p.stem for p in _folder().glob("*.jinja") if p.stem.endswith("_training") == training)


def template_of(name: str) -> str:
    return (_folder() / f"{name}.jinja").read_text(encoding="utf-8")


def _folder() -> Path:
    return Path(find_spec("trl").submodule_search_locations[0]) / "chat_templates"


def tokenizer_of(name: str):
    """A byte-level tokenizer with the template `name`, its markers as special tokens, and its family's bos and eos."""
    template = template_of(name)
    bos, eos = next(ends for family, ends in FAMILIES.items() if name.startswith(family))
    tokenizer = tiny_tokenizer()
    markers = dict.fromkeys([*filter(None, (bos, eos)), *_MARKER.findall(template)])
    tokenizer.add_tokens([m for m in markers if m not in tokenizer.get_vocab()], special_tokens=True)
    tokenizer.chat_template, tokenizer.eos_token = template, eos
    if bos is not None:
        tokenizer.bos_token = bos
    return tokenizer
