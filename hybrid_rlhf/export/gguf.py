"""Convert a model folder to one GGUF file, which llama.cpp and Ollama read. The only module that imports gguf.

One row per model type. A model that llama.cpp would compute differently from transformers (another rotary scaling,
another pre-tokenizer of byte-pair merges) is refused with the reason, rather than written as a file of wrong answers.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hybrid_rlhf.core.config import UserError, check, nearest
from hybrid_rlhf.core.own_files import replacing
from hybrid_rlhf.models.folder_files import read_object
from hybrid_rlhf.models.load import read_settings
from hybrid_rlhf.models.tokenizer import load_tokenizer, turn_ends


def _as_it_is(_name: str, value: torch.Tensor, _config: dict) -> torch.Tensor:
    return value


class Row(NamedTuple):
    """How llama.cpp computes a model type.

    arch: its name there. convert: a weight in llama.cpp's form, from its name, its values and the settings. numbers:
    settings that it reads beside the usual ones -> the writer's method. has_windows: it knows which layers attend to
    a sliding window; for the others the context is no longer than the window. activation: of the feed-forward part.
    refusal: what of the settings llama.cpp would compute otherwise; None if nothing.
    """

    arch: str
    convert: Callable[[str, torch.Tensor, dict], torch.Tensor] = _as_it_is
    numbers: Mapping[str, str] = {}
    has_windows: bool = False
    activation: str = "silu"
    refusal: Callable[[dict], str | None] = lambda _config: None


class _Tensor(NamedTuple):
    """name: llama.cpp's; make: loads its values in fp32."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]


_OTHERWISE = ("For others leave --gguf out, and give the exported folder to llama.cpp's own converter: "
              "python convert_hf_to_gguf.py FOLDER")
TYPES = ("f32", "f16", "bf16", "q8_0")  # of matrices; vectors are f32

_LLAMA_3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
            r"\s+(?!\S)|\s+")
_CASES = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
# Regular expression of the pre-tokenizer in tokenizer.json -> llama.cpp's name for it. dbrx is llama-bpe for those that
# merge also what is a token as a whole.
_QWEN_2 = _LLAMA_3.replace("{1,3}", "")
_SPLITS = {_LLAMA_3: "dbrx", _QWEN_2: "qwen2",
           _QWEN_2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}"): "qwen35",
           _CASES % ("*", "+") + _CASES % ("+", "*")
           + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "gpt-4o"}
_NEVER = -1e9  # the score of what no merge makes
_LEFT_OUT = ("visual.", "vision_tower.", "multi_modal_projector.", "mtp.")  # parts that read images or guess ahead


def check_convertible(folder: str | Path, dtype: str) -> None:
    """UserError unless `folder` is a causal model that a row describes; reads JSON files only."""
    check(dtype in TYPES, f"--gguf {dtype}: choose {', '.join(TYPES)}{nearest(dtype, TYPES)}")
    settings = read_object(Path(folder) / "config.json")
    kind = settings.get("model_type")
    check(kind in ROWS, f"{folder} is a {kind} model; GGUF export knows {', '.join(ROWS)}. {_OTHERWISE}")
    check(not any("Classification" in name for name in settings.get("architectures") or []),
          f"{folder} is a reward model; llama.cpp runs language models: leave --gguf out")
    row, config = ROWS[kind], _settings(Path(folder))
    kind = _rope(config).get("rope_type", "default")
    known = ("default", "linear", "yarn", "llama3", *(["longrope"] if row.arch == "phi3" else []))
    check(kind in known, f"{folder}: rotary scaling {kind!r} has no GGUF form here; {', '.join(known)} have")
    reason = (row.refusal(config) or _odd_yarn(_rope(config)) or _odd_activation(config, row)
              or _odd_windows(config, row) or _odd_shape(config, row))
    check(reason is None, f"{folder}: {reason}, which llama.cpp's {row.arch} computes otherwise or not at all; leave "
                          "--gguf out")
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
    row, config = ROWS[read_object(folder / "config.json")["model_type"]], _settings(folder)
    with replacing(path) as (beside,):
        writer = gguf.GGUFWriter(beside, row.arch)
        try:
            _add_shape(writer, config, row, name or folder.name, dtype)
            _add_vocabulary(writer, folder, config["vocab_size"])
            _add_tensors(writer, list(_tensors(folder, config, row)), dtype)
        finally:
            writer.close()
    return path


def _add_tensors(writer, tensors: list[_Tensor], dtype: str) -> None:  # noqa: ANN001 - gguf's class
    """Write the file's header, then each tensor as it is loaded: gguf's temporary file of all of them would take memory
    where /tmp is in memory."""
    import gguf

    kinds = []
    for tensor in tensors:
        is_matrix = len(tensor.shape) > 1 and "ssm_conv1d" not in tensor.name  # whose kernel reads f32
        kind = getattr(gguf.GGMLQuantizationType, (dtype if is_matrix else "f32").upper())
        if dtype == "q8_0" and is_matrix and tensor.shape[-1] % 32:
            kind = gguf.GGMLQuantizationType.F16  # blocks of 32 numbers
        in_bytes = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
        writer.add_tensor_info(tensor.name, in_bytes, np.dtype(np.uint8), math.prod(in_bytes), raw_dtype=kind)
        kinds.append(kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, kind in zip(tensors, kinds, strict=True):
        writer.write_tensor_data(gguf.quants.quantize(tensor.make(), kind))


def _settings(folder: Path) -> dict:
    """transformers' settings of the language model, with all defaults and in today's form."""
    return read_settings(str(folder)).get_text_config().to_dict()


def _rope(config: dict, layers: str = "full_attention") -> dict:
    """Rotary settings of these layers, for models that have two kinds of them."""
    rope = config["rope_parameters"]
    return rope.get(layers, rope)


def _odd_yarn(rope: dict) -> str | None:
    """The setting of YaRN that is not llama.cpp's own value."""
    if rope.get("rope_type") != "yarn":
        return None
    usual = {"beta_fast": 32, "beta_slow": 1, "attention_factor": 0.1 * math.log(rope["factor"]) + 1, "truncate": True}
    return next((f"rope_parameters.{name} is {rope[name]}" for name in (*usual, "mscale", "mscale_all_dim")
                 if rope.get(name) is not None and not math.isclose(rope[name], usual.get(name, 0))), None)


def _odd_activation(config: dict, row: Row) -> str | None:
    """An activation other than the one in llama.cpp's code, which reads none from the file."""
    name = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    return None if config.get(name) in (None, row.activation) else f"{name} is {config[name]} and not {row.activation}"


def _odd_windows(config: dict, row: Row) -> str | None:
    """Rotary settings of the layers with a window, which llama.cpp never scales, and gives OLMo's the others' base."""
    if not (row.has_windows and config.get("sliding_window")):
        return None
    rope, theta = _rope(config, "sliding_attention"), _rope(config)["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        return f"rope_parameters.sliding_attention has rope_type {rope['rope_type']}"
    is_odd = row.arch == "olmo2" and rope["rope_theta"] != theta
    return f"rope_parameters.sliding_attention has rope_theta {rope['rope_theta']}, and not {theta}" if is_odd else None


def _odd_shape(config: dict, row: Row) -> str | None:
    """Biases and heads that are rotated in part: llama.cpp loads no file with them where its code knows none."""
    if row.arch not in ("phi3", "qwen35") and _rotated(config) != _head_dim(config):
        return f"rope_parameters.partial_rotary_factor is {_rope(config)['partial_rotary_factor']} and not 1"
    biases = () if row.arch in ("llama", "granite") else ("attention_bias", "mlp_bias")
    return next((f"{name} is set" for name in biases if config.get(name)), None)


def _head_dim(config: dict) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _add_shape(writer, config: dict, row: Row, name: str, dtype: str) -> None:  # noqa: ANN001 - gguf's class
    import gguf

    rope, heads = _rope(config), config["num_attention_heads"]
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    writer.add_name(name)
    writer.add_file_type(getattr(gguf.LlamaFileType, {"f32": "ALL_F32"}.get(dtype, f"MOSTLY_{dtype.upper()}")))
    writer.add_vocab_size(config["vocab_size"])
    positions = config["max_position_embeddings"]
    if window and row.has_windows:
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        writer.add_rope_freq_base_swa(_rope(config, "sliding_attention")["rope_theta"])
        window = None
    # without windows there, a context as long as the window is the same model
    writer.add_context_length(min(positions, window or positions))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(_rotated(config))
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[rope["rope_type"].upper()])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(_trained(config))
    if rope.get("rope_type") == "longrope":  # LongRoPE (2402.13753), its factor on the attention's logits
        factor = config["max_position_embeddings"] / _trained(config)
        writer.add_rope_scaling_attn_factors(
            rope.get("attention_factor") or math.sqrt(1 + max(0.0, math.log(factor)) / math.log(_trained(config))))
    for setting, method in row.numbers.items():
        if config.get(setting) is not None:
            getattr(writer, method)(config[setting])
    if row.arch == "qwen35":
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
        writer.add_full_attention_interval(_interval(config))
        writer.add_rope_dimension_sections([*rope.get("mrope_section", (11, 11, 10)), 0])


def _rotated(config: dict) -> int:
    """How many numbers of a head are rotated."""
    return int(_head_dim(config) * _rope(config).get("partial_rotary_factor", 1.0))


def _trained(config: dict) -> int:
    """The positions before the rotary embedding was scaled."""
    return _rope(config).get("original_max_position_embeddings") or config["original_max_position_embeddings"]


def _tensors(folder: Path, config: dict, row: Row) -> Iterator[_Tensor]:
    """Every weight, by llama.cpp's name."""
    import gguf
    from safetensors import safe_open

    arch = next(a for a, text in gguf.MODEL_ARCH_NAMES.items() if text == row.arch)
    names, left_out = gguf.get_tensor_name_map(arch, config["num_hidden_layers"]), 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name.removeprefix("model.").startswith(_LEFT_OUT):
                    left_out += 1
                    continue
                known = name.replace("language_model.model.", "model.").replace("language_model.", "")
                new = names.get_name(known.replace(".dt_bias", ".dt_proj.bias"), try_suffixes=(".weight", ".bias"))
                if new is None:
                    raise UserError(f"{path.name} holds {name}, which llama.cpp's {row.arch} has no place for; "
                                    "leave --gguf out")
                shape = file.get_slice(name).get_shape()
                shape = (shape[0], shape[2]) if len(shape) == 3 else tuple(shape)  # a convolution of each channel
                yield _Tensor(new, shape, partial(_read, path, name, config, row))
    if left_out:
        print(f"note: {left_out} weights that read images or guess several tokens ahead are not in the GGUF file",
              file=sys.stderr)
    rope, factors = _rope(config), {}
    if rope.get("rope_type") == "llama3":
        factors = {"rope_freqs": llama3_factors(rope, _head_dim(config))}
    elif rope.get("rope_type") == "longrope":
        factors = {f"rope_factors_{each}": np.array(rope[f"{each}_factor"], dtype=np.float32)
                   for each in ("long", "short")}
    for name, values in factors.items():
        yield _Tensor(f"{name}.weight", values.shape, lambda values=values: values)


def _read(path: Path, name: str, config: dict, row: Row) -> np.ndarray:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        value = file.get_tensor(name).to(torch.float32)
    value = value.squeeze(1) if value.ndim == 3 else value
    return row.convert(name, value, config).numpy()


def _neighbours(name: str, value: torch.Tensor, config: dict) -> torch.Tensor:
    """For rotary embeddings that rotate neighbouring numbers, where transformers rotates halves."""
    if ".q_proj." in name:
        return interleaved(value, config["num_attention_heads"])
    if ".k_proj." in name:
        return interleaved(value, config.get("num_key_value_heads") or config["num_attention_heads"])
    return value


def _with_one(name: str, value: torch.Tensor, _config: dict) -> torch.Tensor:
    """Norms whose weight transformers adds to 1."""
    return value + 1 if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight") else value


def _gated_delta(name: str, value: torch.Tensor, config: dict) -> torch.Tensor:
    """Qwen3.5's linear attention: decay rates themselves, and the value heads of a key head not side by side, but all
    first ones before all second ones."""
    if name.endswith(".A_log"):
        value = -value.exp()
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    part = name.partition(".linear_attn.")[2].partition(".")[0]
    if not part or part == "norm" or keys == values:
        return _with_one(name, value, config)
    if part == "out_proj":
        return value.unflatten(1, (keys, values // keys, -1)).transpose(1, 2).flatten(1, 3).contiguous()
    before = 2 * keys * config["linear_key_head_dim"] if part in ("in_proj_qkv", "conv1d") else 0  # queries and keys
    heads = value[before:].unflatten(0, (keys, values // keys, -1)).transpose(0, 1).flatten(0, 2)
    return torch.cat([value[:before], heads])


def _interval(config: dict) -> int:
    """Every which layer of Qwen3.5 has full attention."""
    return config["layer_types"].index("full_attention") + 1 if "full_attention" in config["layer_types"] else 4


def _odd_gemma(config: dict) -> str | None:
    """llama.cpp divides by the head's size, or by the hidden size per head where it knows the 27B by its layers."""
    head = config["hidden_size"] // config["num_attention_heads"] if config["num_hidden_layers"] == 62 else (
        _head_dim(config))
    if config["query_pre_attn_scalar"] != head:
        return f"query_pre_attn_scalar is {config['query_pre_attn_scalar']} and not {head}"
    return next((f"{name} is set" for name in ("attn_logit_softcapping", "use_bidirectional_attention")
                 if config.get(name)), None)


def _odd_smollm3(config: dict) -> str | None:
    usual = [int((i + 1) % 4 != 0) for i in range(config["num_hidden_layers"])]
    return None if config["no_rope_layers"] == usual else "no_rope_layers is not every fourth layer"


def _odd_qwen35(config: dict) -> str | None:
    if config["linear_key_head_dim"] != config["linear_value_head_dim"]:
        return "linear_value_head_dim is not linear_key_head_dim"
    usual = [(i + 1) % _interval(config) == 0 for i in range(config["num_hidden_layers"])]
    full = [kind == "full_attention" for kind in config["layer_types"]]
    return None if full == usual else "full attention is not in every nth layer"


_GRANITE = {"attention_multiplier": "add_attention_scale", "embedding_multiplier": "add_embedding_scale",
            "residual_multiplier": "add_residual_scale", "logits_scaling": "add_logit_scale"}
_QWEN35 = {"linear_conv_kernel_dim": "add_ssm_conv_kernel", "linear_key_head_dim": "add_ssm_state_size",
           "linear_num_key_heads": "add_ssm_group_count", "linear_num_value_heads": "add_ssm_time_step_rank"}
ROWS = {
    "llama": Row("llama", _neighbours), "mistral": Row("llama", _neighbours),
    "qwen2": Row("qwen2"), "qwen3": Row("qwen3"),
    "qwen3_5_text": Row("qwen35", _gated_delta, _QWEN35, refusal=_odd_qwen35),
    "gemma3_text": Row("gemma3", _with_one, {"final_logit_softcapping": "add_final_logit_softcapping"},
                       has_windows=True, activation="gelu_pytorch_tanh", refusal=_odd_gemma),
    "phi3": Row("phi3"), "smollm3": Row("smollm3", _neighbours, refusal=_odd_smollm3),
    "olmo2": Row("olmo2"), "olmo3": Row("olmo2", has_windows=True),
    "granite": Row("granite", _neighbours, _GRANITE),
}
ROWS |= {"qwen3_5": ROWS["qwen3_5_text"], "gemma3": ROWS["gemma3_text"]}  # the text part of those that read images


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
    if pattern == _LLAMA_3 and model.get("ignore_merges"):
        return "llama-bpe"
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
    written = read_object(folder / "tokenizer.json")
    tokens, types = _tokens(written)
    writer.add_tokenizer_model("llama" if kind == "spm" else "gpt2")
    writer.add_tokenizer_pre("default" if kind == "spm" else kind)
    if kind == "spm":
        writer.add_token_scores([*_scores(written["model"], tokens), *[_NEVER] * (size - len(tokens))])
        writer.add_add_space_prefix(_adds_space(written))
    unused = range(len(tokens), size)  # rows of the embedding without a token
    writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in unused)])
    writer.add_token_types([*types, *(int(gguf.TokenType.UNUSED) for _ in unused)])
    special.add_to_gguf(writer, quiet=True)
    # end tokens of a turn and of a tool call: llama.cpp ends an answer at these too
    for add, end in zip((writer.add_eot_token_id, writer.add_eom_token_id), turn_ends(tokenizer), strict=False):
        if end != tokenizer.eos_token_id:
            add(end)


def _tokens(tokenizer: dict) -> tuple[list[str], list[int]]:
    """The tokens by id, and their llama.cpp types."""
    import gguf

    model, kinds = tokenizer["model"], gguf.TokenType
    texts = {i: text for text, i in model["vocab"].items()}
    types = {i: kinds.BYTE if model.get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", text)
             else kinds.UNKNOWN if text == model.get("unk_token") else kinds.NORMAL for i, text in texts.items()}
    for token in tokenizer.get("added_tokens", []):
        texts[token["id"]] = token["content"]
        if types.get(token["id"]) != kinds.UNKNOWN:
            types[token["id"]] = kinds.CONTROL if token["special"] else kinds.USER_DEFINED
    ids = range(max(texts) + 1)
    return [texts.get(i, f"[PAD{i}]") for i in ids], [int(types.get(i, kinds.UNUSED)) for i in ids]


def _scores(model: dict, tokens: list[str]) -> list[float]:
    """SentencePiece's scores: llama.cpp joins the neighbours whose token has the highest, so that the first merge has
    the highest of all."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    return [float(-ranks[token]) if token in ranks else _NEVER for token in tokens]


def _adds_space(tokenizer: dict) -> bool:
    """Whether a space is put before a text."""
    before, normal = tokenizer.get("pre_tokenizer") or {}, tokenizer.get("normalizer") or {}
    steps = [*before.get("pretokenizers", [before]), *normal.get("normalizers", [normal])]
    return any(step.get("type") == "Prepend" or (step.get("type") == "Metaspace" and step.get(
        "prepend_scheme", "always") != "never") for step in steps)
