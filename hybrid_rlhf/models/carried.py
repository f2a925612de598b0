"""Copy to an export what stays unchanged from the folder that its model was loaded from: every file that describes
it and is not written again (a processor's settings, a licence), and the tensors that its class does not read.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from torch import Tensor, nn

from hybrid_rlhf.models.complete import few
from hybrid_rlhf.models.folder_files import CONFIG, files_inside, is_local, read_object
from hybrid_rlhf.models.transformers_compat import has_own_code, is_published_quantised

_log = logging.getLogger(__name__)
# What describes a model beside its weights: settings, templates, vocabularies, licences.
_TAKEN = ("*.json", "*.jinja", "*.txt", "*.model", "*.md", "*.py", "LICENSE*", "NOTICE*", "USE_POLICY*")
_LARGEST = 64 * 2**20  # bytes of such a file; a larger one is data
# Written again, or about what is not exported: training state, an adapter, the format of quantised weights.
_REPLACED = ("README.md", CONFIG, "generation_config.json", "special_tokens_map.json", "added_tokens.json", "Modelfile",
             "adapter_config.json", "trainer_state.json", "run.json", "quantize_config.json", "quant_config.json",
             "hf_quant_config.json")
_VOCABULARIES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "tekken.json",
                 "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json")


def carry_files(model: nn.Module, tokenizer, folder: Path) -> None:  # noqa: ANN001 - a transformers class
    """Copy the files of the folder that `model` was loaded from to `folder`, without replacing any; those of its
    tokenizer only if it is `tokenizer`."""
    if (base := base_folder(model)) is None:
        return
    for path in files_inside(base):
        is_taken = any(fnmatch(path.name, pattern) for pattern in _TAKEN) and path.stat().st_size <= _LARGEST
        is_left_out = not is_taken or path.name.endswith(".index.json") or path.name in _REPLACED or (
            path.suffix == ".py" and not has_own_code(model)) or (
            path.name in _VOCABULARIES and not _is_tokenizer_of(base, model, tokenizer, folder)) or (
            path.name == "chat_template.json" and (folder / "chat_template.jinja").exists())  # it would win
        if not is_left_out and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)


def _is_tokenizer_of(base: Path, model: nn.Module, tokenizer, folder: Path) -> bool:  # noqa: ANN001
    """Whether `tokenizer`, saved to `folder`, is that of the model's folder `base`, apart from added tokens."""
    files = [place / "tokenizer.json" for place in (base, folder)]
    return str(tokenizer.name_or_path) == model.config.name_or_path or (
        all(file.exists() for file in files) and len({str(read_object(file).get("model")) for file in files}) == 1)


def base_folder(model: nn.Module) -> Path | None:
    """The folder with the files of the model's base; for a hub id, a download without the weights."""
    path = model.config.name_or_path
    return Path(path) if path and is_local(path) else _downloaded(path) if path else None


@cache
def _downloaded(path: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=list(_TAKEN), ignore_patterns=["*/*", "*.index.json"]))
    except (OSError, ValueError, RuntimeError) as error:
        _log.warning("an export will lack the files of %s beside its model (such as a processor's): %s", path,
                     str(error).strip().splitlines()[0])
        return None


def carried_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the base's files that the class of `model` does not read, by name, one at a time. Warns of those
    left out: packed ones, which have no place among plain weights, and those whose files are gone."""
    from safetensors import safe_open

    unread = getattr(model, "unread_tensors", {})
    is_packed = is_published_quantised(model) or getattr(model, "dequantised_by", None) is not None
    carried = {} if is_packed else {k: file for k, file in unread.items() if Path(file).exists()}
    if left_out := unread.keys() - carried.keys():
        _log.warning("the export lacks %s of %s that %s does not read", few(sorted(left_out), "tensor"),
                     model.config.name_or_path, type(model).__name__)
    for name, file in carried.items():
        with safe_open(file, framework="pt") as opened:
            yield name, opened.get_tensor(name)
