"""transformers' processors of images, with torchvision or without it.

AutoProcessor refuses most image-text checkpoints where torchvision is missing, for their videos, although transformers
reads images by Pillow too. There the processor is put together here, without the part for videos.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.models.folder_files import read_object

_FILES = ("processor_config.json", "preprocessor_config.json")  # of checkpoints that read images


def load_processor(path: str) -> Any:  # of transformers
    """The processor of images and text at a folder or hub id; None where there is none, or none of images. Raises
    UserError where it cannot be loaded."""
    from transformers.utils import cached_file, is_torchvision_available, is_vision_available

    if all(cached_file(path, name, _raise_exceptions_for_missing_entries=False) is None for name in _FILES):
        return None
    if not is_vision_available():
        raise UserError(f"{path} reads images, which needs the package pillow; install hybrid-rlhf[vision]")
    try:
        processor = _by_transformers(path) if is_torchvision_available() else _without_videos(path)
    except (ImportError, OSError, ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"the processor of {path} cannot be loaded ({reason}); give a checkpoint with the processor's "
                        "files as published") from error
    return processor if getattr(processor, "image_token", None) is not None else None


def image_ids(path: str, processor: Any) -> frozenset[int]:
    """The tokens in whose places the checkpoint's model puts features, and those between them. The processor alone has
    only the placeholder's, where that is another one (Llama 4)."""
    from transformers.utils import cached_file

    file = cached_file(path, "config.json", _raise_exceptions_for_missing_entries=False)
    config = {} if file is None else read_object(Path(file))
    ids = (*processor.image_token_ids, config.get("image_token_id"), config.get("image_token_index"))
    return frozenset(i for i in ids if i is not None)


def _by_transformers(path: str) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(path)


def _without_videos(path: str) -> Any:
    from transformers import AutoImageProcessor, AutoTokenizer

    settings, tokenizer = _settings(path), AutoTokenizer.from_pretrained(path)
    source = _class_named(settings.pop("processor_class"))
    parts = dict.fromkeys(source.get_attributes()) | {
        "image_processor": AutoImageProcessor.from_pretrained(path, backend="pil"), "tokenizer": tokenizer,
        "chat_template": tokenizer.chat_template}
    lenient = type(source.__name__, (source,), {"check_argument_for_proper_class": lambda *_named: None})
    more = {name: value for name, value in settings.items() if name not in parts and not isinstance(value, dict)}
    processor = lenient(**parts, **more)
    processor.get_attributes = lambda: ["image_processor", "tokenizer"]  # what is there to be saved
    return processor


def _settings(path: str) -> dict:
    """The arguments of the processor, and processor_class, which may stand in another file."""
    from transformers.utils import cached_file

    files = [cached_file(path, name, _raise_exceptions_for_missing_entries=False)
             for name in (*_FILES, "tokenizer_config.json")]
    read = [{} if file is None else read_object(Path(file)) for file in files]
    names = [settings["processor_class"] for settings in read if settings.get("processor_class")]
    if not names:
        raise ValueError("no file names its processor_class")
    return read[0] | {"processor_class": names[0]}


def _class_named(name: str) -> Any:
    """The class from its own module: the package has a stand-in for it that asks for torchvision."""
    import transformers

    for file in Path(transformers.__file__).parent.glob("models/*/processing_*.py"):
        if re.search(rf"^class {re.escape(name)}\(", file.read_text(encoding="utf-8"), re.MULTILINE):
            return getattr(importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}"), name)
    raise ValueError(f"transformers has no {name}")
