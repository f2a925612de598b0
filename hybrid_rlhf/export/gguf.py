"""Convert a model folder to one GGUF file, which llama.cpp and Ollama read. The only module that imports gguf.

One row per model type. A model that llama.cpp would compute differently from transformers (another rotary scaling,
another pre-tokenizer of byte-pair merges) is refused with the reason, rather than written as a file of wrong answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hybrid_rlhf.core.config import UserError, check, nearest
from hybrid_rlhf.core.own_files import fresh_path
from hybrid_rlhf.models.folder_files import read_object
from hybrid_rlhf.models.tokenizer import load_tokenizer, turn_ends


class Row(NamedTuple):
    """arch: llama.cpp's name. is_interleaved: its rotary embedding rotates neighbouring numbers, where transformers
    rotates halves, so that the rows of the query and key projections are permuted."""

    arch: str
    is_interleaved: bool


class _Tensor(NamedTuple):
    """name: llama.cpp's; make: loads its values in fp32."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]


ROWS = {"llama": Row("llama", True), "mistral": Row("llama", True), "qwen2": Row("qwen2", False),
        "qwen3": Row("qwen3", False)}
TYPES = ("f32", "f16", "bf16", "q8_0")  # of matrices; vectors are f32

_LLAMA_3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
            r"\s+(?!\S)|\s+")
# Regular expression of the pre-tokenizer in tokenizer.json -> llama.cpp's name for it.
_SPLITS = {_LLAMA_3: "llama-bpe", _LLAMA_3.replace("{1,3}", ""): "qwen2"}


def check_convertible(folder: str | Path, dtype: str) -> None:
    """UserError unless `folder` is a causal model that a row describes; reads JSON files only."""
    check(dtype in TYPES, f"--gguf {dtype}: choose {', '.join(TYPES)}{nearest(dtype, TYPES)}")
    config = read_object(Path(folder) / "config.json")
    kind = config.get("model_type")
    check(kind in ROWS, f"{folder} is a {kind} model; GGUF export knows {', '.join(ROWS)}. For others use llama.cpp's "
                        "convert_hf_to_gguf.py on the exported folder")
    check(not any("Classification" in name for name in config.get("architectures") or []),
          f"{folder} is a reward model; llama.cpp runs language models: leave --gguf out")
    kind = _rope(config).get("rope_type", "default")
    check(kind in ("default", "linear", "yarn", "llama3"), f"{folder}: rotary scaling {kind!r} has no GGUF form here; "
                                                           "default, linear, yarn and llama3 have")
    _vocabulary_kind(Path(folder))
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError("--gguf needs the gguf package: pip install 'hybrid-rlhf[gguf]'") from error


def write_gguf(folder: str | Path, path: str | Path, dtype: str = "f16", name: str = "") -> Path:
    """Convert the model in `folder` to one file at `path`, one tensor in memory at a time.

    dtype: one of TYPES. Raises UserError as check_convertible does.
    """
    import gguf

    folder, path = Path(folder), Path(path)
    check_convertible(folder, dtype)
    config = read_object(folder / "config.json")
    row = ROWS[config["model_type"]]
    beside = fresh_path(path.parent)
    writer = gguf.GGUFWriter(beside, row.arch)
    try:
        _add_shape(writer, config, name or folder.name, dtype)
        _add_vocabulary(writer, folder, config["vocab_size"])
        _add_tensors(writer, list(_tensors(folder, config, row)), dtype)
    except BaseException:
        writer.close()
        beside.unlink(missing_ok=True)
        raise
    writer.close()
    return beside.replace(path)


def _add_tensors(writer, tensors: list[_Tensor], dtype: str) -> None:  # noqa: ANN001 - gguf's class
    """Write the file's header, then each tensor as it is loaded: gguf's temporary file of all of them would take memory
    where /tmp is in memory."""
    import gguf

    kinds = []
    for tensor in tensors:
        kind = getattr(gguf.GGMLQuantizationType, (dtype if len(tensor.shape) > 1 else "f32").upper())
        if dtype == "q8_0" and len(tensor.shape) > 1 and tensor.shape[-1] % 32:
            kind = gguf.GGMLQuantizationType.F16  # blocks of 32 numbers
        in_bytes = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
        writer.add_tensor_info(tensor.name, in_bytes, np.dtype(np.uint8), math.prod(in_bytes), raw_dtype=kind)
        kinds.append(kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, kind in zip(tensors, kinds, strict=True):
        writer.write_tensor_data(gguf.quants.quantize(tensor.make(), kind))


def _rope(config: dict) -> dict:
    """Rotary settings, from transformers 5's form or the older one."""
    old = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    old.setdefault("rope_type", old.get("type", "default"))
    return config.get("rope_parameters") or old


def _head_dim(config: dict) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _add_shape(writer, config: dict, name: str, dtype: str) -> None:  # noqa: ANN001 - gguf's class
    import gguf

    rope, heads = _rope(config), config["num_attention_heads"]
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    writer.add_name(name)
    writer.add_file_type(getattr(gguf.LlamaFileType, {"f32": "ALL_F32"}.get(dtype, f"MOSTLY_{dtype.upper()}")))
    writer.add_vocab_size(config["vocab_size"])
    # llama.cpp has no sliding window for these: a context as long as the window is the same model
    writer.add_context_length(min(config["max_position_embeddings"], window or config["max_position_embeddings"]))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(_head_dim(config))
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[rope["rope_type"].upper()])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _tensors(folder: Path, config: dict, row: Row) -> Iterator[_Tensor]:
    """Every weight, by llama.cpp's name."""
    import gguf
    from safetensors import safe_open

    arch = next(a for a, text in gguf.MODEL_ARCH_NAMES.items() if text == row.arch)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                new = names.get_name(name, try_suffixes=(".weight", ".bias"))
                if new is None:
                    raise UserError(f"{path.name} holds {name}, which llama.cpp's {row.arch} has no place for; "
                                    "leave --gguf out")
                yield _Tensor(new, tuple(file.get_slice(name).get_shape()), partial(_read, path, name, config, row))
    if _rope(config).get("rope_type") == "llama3":
        factors = llama3_factors(_rope(config), _head_dim(config))
        yield _Tensor("rope_freqs.weight", factors.shape, lambda: factors)


def _read(path: Path, name: str, config: dict, row: Row) -> np.ndarray:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        value, heads = file.get_tensor(name).to(torch.float32), config["num_attention_heads"]
    if row.is_interleaved and ".q_proj." in name:
        value = interleaved(value, heads)
    elif row.is_interleaved and ".k_proj." in name:
        value = interleaved(value, config.get("num_key_value_heads") or heads)
    return value.numpy()


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a projection (num_heads * D, ...) in llama.cpp's order: a head's two halves of D rows interleaved."""
    halves = weight.view(num_heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()


def llama3_factors(rope: dict, dim: int) -> np.ndarray:
    """Divisors of Llama 3.1 for each of the dim / 2 rotary frequencies: 1 for short waves, `factor` for long ones,
    smooth between (transformers' rope_type llama3)."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    context, factor = rope["original_max_position_embeddings"], rope["factor"]
    out = []
    for i in range(0, dim, 2):
        turns = context / (2 * math.pi * rope["rope_theta"] ** (i / dim))  # of this frequency in the first context
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype=np.float32)


# -- vocabulary -------------------------------------------------------------------------------------------------------


def _vocabulary_kind(folder: Path) -> str:
    """llama.cpp's name of the pre-tokenizer, "spm" for SentencePiece. Raises UserError where there is none."""
    check((folder / "tokenizer.json").exists(), f"{folder} has no tokenizer.json; GGUF export reads that one")
    tokenizer = read_object(folder / "tokenizer.json")
    model, before = tokenizer["model"], tokenizer.get("pre_tokenizer") or {}
    check(model.get("type") == "BPE", f"{folder}: a {model.get('type')} tokenizer; GGUF export knows byte-pair ones")
    if model.get("byte_fallback"):
        return "spm"
    steps = before.get("pretokenizers", [before])
    kinds = [step.get("type") for step in steps]
    check("ByteLevel" in kinds, f"{folder}: its tokenizer is not byte-level, and has no GGUF form here; "
                                "leave --gguf out")
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    pattern = next((s["pattern"].get("Regex") for s in steps if s.get("type") == "Split"), None)
    check(pattern in _SPLITS, f"{folder}: its tokenizer splits text by {pattern!r:.80}, which has no GGUF form; "
                                 "leave --gguf out")
    return _SPLITS[pattern]


def _add_vocabulary(writer, folder: Path, size: int) -> None:  # noqa: ANN001
    import gguf

    kind = _vocabulary_kind(folder)
    special = gguf.SpecialVocab(folder, load_merges=kind != "spm", n_vocab=size)
    tokenizer = load_tokenizer(str(folder))
    with_special = tokenizer("a").input_ids
    special.add_special_token = {"bos": bool(with_special) and with_special[0] == tokenizer.bos_token_id, "eos": False}
    if kind == "spm":
        entries = list(gguf.LlamaHfVocab(folder).all_tokens())
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores([score for _, score, _ in entries] + [-1000.0] * (size - len(entries)))
        tokens, types = [text for text, _, _ in entries], [int(t) for _, _, t in entries]
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(kind)
        tokens, types = _byte_level_tokens(read_object(folder / "tokenizer.json"))
    unused = range(len(tokens), size)  # rows of the embedding without a token
    writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in unused)])
    writer.add_token_types([*types, *(int(gguf.TokenType.UNUSED) for _ in unused)])
    special.add_to_gguf(writer, quiet=True)
    # end tokens of a turn and of a tool call: llama.cpp ends an answer at these too
    for add, end in zip((writer.add_eot_token_id, writer.add_eom_token_id), turn_ends(tokenizer), strict=False):
        if end != tokenizer.eos_token_id:
            add(end)


def _byte_level_tokens(tokenizer: dict) -> tuple[list[str], list[int]]:
    """The tokens by id, and their llama.cpp types."""
    import gguf

    texts = {i: text for text, i in tokenizer["model"]["vocab"].items()}
    types = dict.fromkeys(texts, int(gguf.TokenType.NORMAL))
    for token in tokenizer.get("added_tokens", []):
        texts[token["id"]] = token["content"]
        types[token["id"]] = int(gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED)
    ids = range(max(texts) + 1)
    return [texts.get(i, f"[PAD{i}]") for i in ids], [types.get(i, int(gguf.TokenType.UNUSED)) for i in ids]
