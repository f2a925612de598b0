"""Check the files of a model folder before a library reads them, and report in one line what it cannot read.

A folder may come from anyone. Checked: its files are files, its links stay inside it, its JSON can be read, its sizes
are positive integers. An error names the file, and the key where there is one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.memory import is_out_of_memory
from hybrid_rlhf.core.options import nearest_path
from hybrid_rlhf.core.own_files import refusal
from hybrid_rlhf.core.strict_json import loads, why

CONFIG = "config.json"
_READ = (".json", ".safetensors", ".bin", ".jinja", ".model")  # suffixes of files that libraries read,
_READ_TEXTS = ("vocab.txt", "merges.txt", "dict.txt")  # and names of such text files
_TEMPLATES = "additional_chat_templates"
_OF_A_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json",
                   "chat_template.jinja")
_OF_A_MODEL = (CONFIG, "generation_config.json")
_ANEW = "download or export the model anew"
LIKE_SAVED = "give the config.json that the model was saved with"
# Whole numbers of at least 1 wherever a configuration has them; of most types a list has one for each layer.
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
          "intermediate_size", "max_position_embeddings")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
_MANY = 10_000  # layers, labels
_KINDS = {"model_type": (str, "the name of a model type"), "hidden_act": (str, "the name of a function"),
          "architectures": (list, "a list of class names"), "layer_types": (list, "a list of names"),
          "num_labels": (int, f"a whole number, at most {_MANY}"), "sliding_window": (int, "a whole number or null"),
          "pad_token_id": (int, "a token id or null"), "bos_token_id": ((int, list), "a token id or null"),
          "eos_token_id": ((int, list), "a token id, a list of them, or null"),
          **dict.fromkeys(("text_config", "quantization_config", "id2label", "label2id", "rope_parameters",
                           "rope_scaling", "auto_map"), (dict, "a mapping"))}


def check_files(folder: Path) -> None:
    """Raise UserError where a file that a library may read is not a regular file, or is a link that leaves the folder.
    Links into a hub cache pass: there a model's files are links to blobs."""
    homes, inner = _homes(folder), folder / _TEMPLATES
    for path in sorted([*folder.iterdir(), *(inner.iterdir() if inner.is_dir() else ())]):
        if path.suffix not in _READ and path.name not in _READ_TEXTS and path != inner:
            continue
        if path.is_symlink():
            target = Path(os.path.realpath(path))
            check(_is_inside(target, homes),
                  f"{path} is a link that leads out of its folder, to {target}; copy the file itself there, or give "
                  f"the folder that it leads to ({target.parent})")
            check(path.exists(), f"{path} is a broken link; {_ANEW}")
        is_folder = path == inner
        check(path.is_dir() if is_folder else stat.S_ISREG(path.stat().st_mode),
              f"{path} is not a {'folder' if is_folder else 'file'}; {_ANEW}")


def files_inside(folder: Path) -> list[Path]:
    """The files of a model folder, links to files elsewhere left out."""
    homes = _homes(folder)
    return [path for path in sorted(folder.iterdir())
            if path.is_file() and _is_inside(Path(os.path.realpath(path)), homes)]


def _homes(folder: Path) -> list[Path]:
    """Folders that the links of a model folder may lead to: itself, the blobs beside its snapshots, the hub cache."""
    home, environment = folder.resolve(), os.environ
    cache = environment.get("HF_HUB_CACHE") or Path(
        environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"), "hub")
    blobs = [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"]
    return [home, *(Path(os.path.realpath(os.path.expanduser(place))) for place in (*blobs, cache))]


def _is_inside(target: Path, homes: Collection[Path]) -> bool:
    """Whether a file is in one of these folders, or in the blobs of any hub cache."""
    return any(target.is_relative_to(home) for home in homes) or any(
        parent.name == "blobs" and any(above.name.startswith("models--") for above in parent.parents)
        for parent in target.parents)


def read_object(path: Path) -> dict:
    """The JSON object in a file. UserError, with the reason, for anything else."""
    try:
        value = loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; {_ANEW}") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({why(error)}); {_ANEW}") from error
    check(isinstance(value, dict), f"{path} holds no JSON object; {_ANEW}")
    return value


def is_local(path: str) -> bool:
    """Whether a model is a local folder, and not a hub id."""
    return Path(path).is_dir()


def config_of(path: str) -> str:
    """The name, in messages, of the configuration of the model at a folder or hub id."""
    return str(Path(path) / CONFIG) if is_local(path) else path + nearest_path(path)


def check_config(path: str) -> None:
    """UserError for a config.json that cannot be read, or where a key common to all model types has a value of a wrong
    type. Keys of single model types are left to transformers."""
    file = Path(path) / CONFIG
    config = read_object(file)
    _check_names(file, config, ("transformers_weights",))
    inner = config.get("text_config")
    for settings in (config, *([inner] if isinstance(inner, dict) else [])):
        for key, value in settings.items():
            wanted = _misfit(key, value)
            check(wanted is None, f"{file}: {key} is {value!r:.60}; it must be {wanted}")
        heads, groups = settings.get("num_attention_heads"), settings.get("num_key_value_heads")
        if type(heads) is int and type(groups) is int:
            check(heads % groups == 0, f"{file}: num_attention_heads {heads} does not divide by num_key_value_heads "
                                       f"{groups}; {LIKE_SAVED}")


def check_tokenizer_config(path: str) -> None:
    """Raise UserError for a tokenizer_config.json that cannot be read, or names files elsewhere; it may be missing."""
    file = Path(path) / "tokenizer_config.json"
    if file.exists():
        _check_names(file, read_object(file), ("fast_tokenizer_files", "init_inputs"))


def _check_names(file: Path, config: dict, keys: Collection[str]) -> None:
    """Raise UserError unless the files that these keys name are in the folder itself."""
    for key in keys:
        names = config.get(key) or []
        for name in names if isinstance(names, list) else [names]:
            check(isinstance(name, str) and Path(name).name == name,
                  f"{file}: {key} names {name!r:.80}, which is not a file of the folder; {_ANEW}")


def _misfit(key: str, value: object) -> str | None:
    """What the value of a key must be, if it is wrong; None if it is right."""
    if value is None:
        return None
    if key in _LAYERS and type(value) is int and value > _MANY:  # transformers first builds lists of that length
        return f"at most {_MANY}"
    if key in _SIZES:
        numbers = value if isinstance(value, list) else [value]
        return None if all(type(n) is int and n >= 1 for n in numbers) else "a whole number, 1 or more"
    if key in ("dtype", "torch_dtype"):
        name = value.removeprefix("torch.") if isinstance(value, str) else ""
        is_one = name == "auto" or isinstance(getattr(torch, name or "_", None), torch.dtype)
        return None if is_one else "a dtype of torch, such as float32 or bfloat16"
    kind, expected = _KINDS.get(key, (object, ""))
    if not isinstance(value, kind) or (kind is int and not -1 <= value <= _MANY and key == "num_labels"):
        return expected
    return None if kind is not list or all(isinstance(item, str) for item in value) else expected


def check_fits(path: str, wanted: int, sizes: Collection[int]) -> None:
    """UserError where a model of `wanted` parameters is far larger than the files of the folder `path`, whose tensors
    have these `sizes`: missing ones would be initialised, and may exceed the machine's memory.

    Packed 4-bit weights and untied heads may explain up to four times as many parameters as stored numbers.
    """
    there = sum(sizes)
    check(not there or wanted <= 4 * there + 2**20,
          f"{config_of(path)} describes a model of {wanted:,} parameters, and the weights beside it are {there:,}; "
          f"{LIKE_SAVED}")


@contextmanager
def refusing(what: str, hint: str, files: Collection[Path] = ()) -> Iterator[None]:
    """Within the block any error of a library that reads model files becomes a UserError: about the first of `files`
    that cannot be read, or else `what`, the reason and `hint`."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # from Rust, not an Exception
            raise
        if is_out_of_memory(error) or refusal(error):  # not the files' fault
            raise
        for path in files:
            if path.exists():
                _check_readable(path)
        raise UserError(f"{what}: {reason_of(error)}; {hint}") from error


def _check_readable(path: Path) -> None:
    if path.suffix == ".json":
        read_object(path)
        return
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({reason_of(error)}); {_ANEW}") from error


def reason_of(error: BaseException) -> str:
    """The message of an error in one line. For a configuration that transformers checks field by field: the field."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if type(error).__name__.startswith("StrictDataclass") and len(lines) > 1:
        return lines[1].partition(": ")[2][:300].rstrip(".")
    is_plain = isinstance(error, (OSError, ValueError, RuntimeError)) and lines
    return ": ".join([*([] if is_plain else [type(error).__name__]), *lines[:1]])[:300].rstrip(".")


def model_files(path: str) -> list[Path]:
    """The text files that describe the model at `path`, existing or not."""
    return [Path(path) / name for name in _OF_A_MODEL]


def tokenizer_files(path: str) -> list[Path]:
    """The text files that a tokenizer is made of."""
    return [Path(path) / name for name in _OF_A_TOKENIZER]
