"""Models from a hub id, a folder or a named preset. Imports transformers."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hybrid_rlhf.core import accelerator, hub
from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.distributed import world_size
from hybrid_rlhf.core.hub import stay_offline_if_unreachable
from hybrid_rlhf.core.options import check_values, nearest_path, one_of
from hybrid_rlhf.models import complete, folder_files, quantize, weight_parts, weights
from hybrid_rlhf.models.backbone import reads_text, towers
from hybrid_rlhf.models.lora import LoraConfig, check_targets
from hybrid_rlhf.models.transformers_compat import each_as_read, names_read, shortage_passes

_log = logging.getLogger(__name__)
_LOADABLE = "give a model that this release of transformers loads"
ATTENTIONS = ("auto", "sdpa", "eager", "flash_attention_2")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Random small models: (model type, configuration). The vocabulary comes from the tokenizer.
PRESETS: dict[str, tuple[str, dict]] = {
    "tiny": ("llama", dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                           num_key_value_heads=2, max_position_embeddings=256)),
    # so small that only a wide initialisation lets attention form within the demo's minutes
    "demo": ("llama", dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
                           num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=True,
                           initializer_range=0.06)),
    "small": ("llama", dict(hidden_size=288, intermediate_size=768, num_hidden_layers=6, num_attention_heads=6,
                            num_key_value_heads=6, max_position_embeddings=1024, tie_word_embeddings=True)),
}


@dataclass(frozen=True)
class ModelConfig:
    """Which model to load, and in which form.

    Attributes:
        model_name_or_path: Hub id or local folder of a causal language model.
        preset: Instead of that: a random model from scratch (tiny, demo, small), with a tokenizer trained on the data.
        tokenizer_name_or_path: Tokenizer, where it is not the model's own.
        vocab_size: Size of the tokenizer that a preset trains.
        dtype: auto (bfloat16 on an accelerator, float16 on NVIDIA cards before Ampere; on a CPU float32, or bfloat16
            with fp32 masters to train 20 million weights or more where the processor multiplies it), float32, bfloat16
            or float16.
        attn_implementation: auto (transformers' choice; eager where scores are soft-capped), sdpa, eager or
            flash_attention_2 (an accelerator, 16-bit weights and the package flash_attn).
        gradient_checkpointing: Recompute activations in the backward pass instead of keeping them.
        freeze: Regular expressions; parameters whose name matches one (re.search) are not trained.
        freeze_vision: Whether the parts that read images stay as they are. false trains them with the rest of the
            weights, on rows with images; adapters are always on the text part.
        trust_remote_code: Run code that the model's repository brings. Off unless you know its author.
        trust_pickled_weights: Take weights saved as *.bin too, which are pickles, read with torch's weights_only.
        load_in_4bit: Hold the linear layers' frozen weights in 4 bits (NF4, bitsandbytes); needs lora.r > 0 to train.
        load_in_8bit: The same in 8 bits.
        lora: Low-rank adapters (r = 0: train all weights).
    """

    model_name_or_path: str | None = None
    preset: str | None = one_of(None, PRESETS)
    tokenizer_name_or_path: str | None = None
    vocab_size: int = 512
    dtype: str = one_of("auto", ("auto", *DTYPES))
    attn_implementation: str = one_of("auto", ATTENTIONS)
    gradient_checkpointing: bool = False
    freeze: list[str] = field(default_factory=list)
    freeze_vision: bool = True
    trust_remote_code: bool = False
    trust_pickled_weights: bool = False
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        check_values(self, "model.")
        for pattern in self.freeze:
            check(_compiles(pattern), f"model.freeze: {pattern!r} is not a regular expression; "
                  "fix it, for names such as layers\\.0")
        check(not (self.preset and self.model_name_or_path),
              "model.preset and model.model_name_or_path are both given; a run starts from one model")
        check(not (self.load_in_4bit and self.load_in_8bit),
              "model.load_in_4bit and model.load_in_8bit are both on; choose one")
        check(self.freeze_vision or not self.lora.r,
              "model.freeze_vision is false, and adapters (model.lora.r) freeze all others; set one of them back")
        check(not (self.preset and self.quantize),
              f"model.load_in_{self.quantize} with model.preset: a random model has nothing worth freezing; "
              "leave it out")

    @property
    def quantize(self) -> str | None:
        """4bit, 8bit or None."""
        return "4bit" if self.load_in_4bit else "8bit" if self.load_in_8bit else None


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype that `model.dtype` means on `device`."""
    if name == "auto":
        return accelerator.automatic_dtype(device)
    accelerator.warn_of_emulation(DTYPES[name], device)
    return DTYPES[name]


def check_folder(path: str, needs: Iterable[str] = ("weights", "tokenizer"), takes_pickles: bool = False) -> None:
    """Raise UserError if `path` is a local folder that cannot hold a model; hub ids pass."""
    folder = Path(path)
    if not folder.exists():
        looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
        check(not looks_local, f"model folder {path} does not exist{nearest_path(path)}; give a folder that does, or a "
                                "hub id")
        stay_offline_if_unreachable()
        return
    refuse_gguf(folder)
    check(folder.is_dir(), f"{path} is a file; a model is a folder with config.json, weights and a tokenizer")
    folder_files.check_files(folder)
    is_tokenizer = tuple(needs) == ("tokenizer",)  # such as one beside an adapter
    check(is_tokenizer or (folder / "config.json").exists(), f"{path} is not a model folder; it needs a config.json")
    if "weights" in needs and not list(folder.glob("*.safetensors")):
        pickled = sorted(folder.glob("*.bin"))
        check(bool(pickled), f"{path} has no weights: no *.safetensors beside its config.json; "
                             "save it by transformers 4.35 or newer, or give another folder")
        check(takes_pickles, f"{path} holds its weights as {pickled[0].name}, a pickle that could run "
                             "code on load; convert it to model.safetensors, or set model.trust_pickled_weights")
    if "tokenizer" in needs:
        known = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
        if not any((folder / n).exists() for n in known):
            check(not (folder / "tekken.json").exists(),
                  f"{path} has its tokenizer as tekken.json, which Mistral's own library alone reads; give a "
                  "tokenizer.json of the same vocabulary by model.tokenizer_name_or_path (Mistral Small 3.1's for 3.2)")
            raise UserError(f"{path} has no tokenizer: none of {', '.join(known)} (or give "
                            "model.tokenizer_name_or_path)")


def refuse_gguf(path: Path) -> None:
    """UserError for a GGUF file, and for a folder with a GGUF file and no model."""
    is_file = path.suffix == ".gguf"
    files = [path] if is_file else [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
    if files:
        name = str(path) if is_file else f"{path} ({files[0].name})"
        raise UserError(f"{name} is llama.cpp's GGUF, which is not read here; give the folder that it was made from, "
                        "with config.json, *.safetensors and a tokenizer")


def load_causal_lm(config: ModelConfig, device: torch.device | str = "cpu", *, in_parts: bool = False) -> nn.Module:
    """The causal language model of `config` (without adapters), on `device`.

    in_parts: with several processes each keeps its part of each weight as it is read (models/weight_parts.py), for ZeRO
    3 to take over; quantised weights are not partitioned.

    Raises UserError for a folder without a model, for weights that do not match, and for an encoder-decoder.
    """
    return _load(None, config, torch.device(device), in_parts=in_parts)


def load_scalar_model(config: ModelConfig, device: torch.device | str = "cpu", new_head_std: float | None = None,
                      pad_id: int | None = None, *, in_parts: bool = False) -> nn.Module:
    """A sequence-classification model with one label; from a causal model the head is new.

    in_parts: as for load_causal_lm.
    new_head_std: standard deviation of a newly made head's weights (None: 1 / sqrt(hidden size + 1)).
    """
    is_new = new_head_std is not None or not has_score(config.model_name_or_path, config.trust_remote_code)
    model = _load(scalar_class(configuration(config)), config, torch.device(device), is_new=is_new,
                  in_parts=in_parts, num_labels=1)
    check(hasattr(model, "score"), f"{type(model).__name__} has no linear score head; use a decoder-only model")
    if is_new:
        std = (model.score.in_features + 1) ** -0.5 if new_head_std is None else new_head_std
        nn.init.normal_(model.score.weight, std=std)
    if pad_id is not None:
        model.config.get_text_config().pad_token_id = pad_id
    return model


def load_classifier(config: ModelConfig, device: torch.device | str = "cpu") -> nn.Module:
    """A sequence-classification model as it is, encoder or decoder, with all its labels."""
    return _load("AutoModelForSequenceClassification", config, torch.device(device))


def load_token_classifier(config: ModelConfig, device: torch.device | str = "cpu") -> nn.Module:
    """A token-classification model as it is, with all its labels."""
    return _load("AutoModelForTokenClassification", config, torch.device(device))


def has_score(path: str, trust_remote_code: bool = False) -> bool:
    """Whether a model's configuration says that it already is a sequence-classification model."""
    return is_kind("SequenceClassification", path, trust_remote_code)


def is_kind(kind: str, path: str, trust_remote_code: bool = False) -> bool:
    """Whether a model's configuration says that it is of a class whose name has `kind` in it."""
    return any(kind in name for name in read_settings(path, trust_remote_code).architectures or [])


def causal_class(settings) -> str:  # noqa: ANN001 - a transformers class
    """The auto class that loads the causal language model of transformers' configuration `settings`: the multimodal one
    where `architectures` names such a class, or where there is no other, so that its towers are kept.
    """
    import transformers

    composite = transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING
    if type(settings) not in composite:
        return "AutoModelForCausalLM"
    is_named = composite[type(settings)].__name__ in (settings.architectures or ())
    is_only = type(settings) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return "AutoModelForMultimodalLM" if is_named or is_only else "AutoModelForCausalLM"


def scalar_class(settings) -> str:  # noqa: ANN001 - a transformers class
    """The auto class that loads a sequence classification model of transformers' configuration `settings`. A type
    without such a class gets transformers' generic one, over its backbone; UserError where there is no backbone."""
    import transformers
    from transformers.modeling_layers import GenericForSequenceClassification

    kind, auto_class = type(settings), transformers.AutoModelForSequenceClassification
    if kind not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        backbone = transformers.MODEL_MAPPING.get(kind, None)
        check(backbone is not None and backbone.__name__.endswith("Model") and not settings.is_encoder_decoder,
              f"a reward model or critic of type {settings.model_type}: transformers has no class for it; take another "
              "model, or for a critic roles.critic.kind adapter with model.lora.r")
        family = next(c for c in backbone.__mro__ if c.__name__.endswith("PreTrainedModel"))
        name = f"{backbone.__name__.removesuffix('Model')}ForSequenceClassification"
        scalar = type(name, (GenericForSequenceClassification, family), {  # else it would count as custom code, whose
            "__module__": backbone.__module__, "config_class": kind,  # buffers transformers does not initialise
            "base_model_prefix": backbone.base_model_prefix})
        auto_class.register(kind, scalar, exist_ok=True)  # else transformers skips its own configurations
        _log.warning("transformers has no sequence classification class for %s: the model is a %s, which this library "
                     "loads, and transformers alone does not", settings.model_type, name)
    return auto_class.__name__


def _load(auto_class: str | None, config: ModelConfig, device: torch.device, is_new: bool = False,
          in_parts: bool = False, **extra: object) -> nn.Module:
    """auto_class: None means `causal_class`. is_new: whether the score head may be missing and is newly initialised.
    in_parts: as for load_causal_lm."""
    import transformers

    path = config.model_name_or_path
    check(path is not None, "no model: give model.model_name_or_path (hub id or folder) or model.preset")
    settings = configuration(config)
    auto_class = auto_class or causal_class(settings)
    complete.check_index(path)
    if folder_files.is_local(path):
        complete.check_no_adapter(path)
        empty = _empty(auto_class, config, settings, **extra)
        folder_files.check_fits(path, sum(p.numel() for p in empty.parameters()), weights.sizes(path))
        extra["adapter_kwargs"] = {"subfolder": "none"}  # keeps transformers from loading an adapter beside it
    accelerator.check_kernels(device)
    extra |= named_attention(config, settings)
    in_parts, reading = in_parts and world_size() > 1, nullcontext()
    dtype = resolve_dtype(config.dtype, device)
    if (dequantise := complete.dequantising(settings, path)) is not None:
        extra["quantization_config"] = getattr(transformers, dequantise)(dequantize=True)
    if config.quantize:
        quantize.require(f"model.load_in_{config.quantize}")
        compute = {"bnb_4bit_compute_dtype": dtype} if config.load_in_4bit else {}
        skip = ["score"] if "num_labels" in extra else None  # None: transformers' default, which skips the head
        if settings.get_text_config() is not settings and (kept := towers(_empty(auto_class, config, settings))):
            skip = [*(skip or ["lm_head"]), *kept]
        extra["device_map"] = {"": device}
        if not getattr(settings, "quantization_config", None):  # else the files say how they are quantised
            extra["quantization_config"] = transformers.BitsAndBytesConfig(
                **quantize.SETTINGS[config.quantize], **compute, llm_int8_skip_modules=skip)
    elif in_parts:
        reading = each_as_read(partial(weight_parts.cut_as_read, device=device))
    elif device.type == "cuda":  # tensor by tensor, as it is read: the host never holds the model
        extra["device_map"] = {"": device}
    # no warnings: a new score.weight is intended
    with _only_errors(), shortage_passes(), reading, names_read() as read, folder_files.refusing(
            f"cannot load {path} by {auto_class}", _LOADABLE, folder_files.model_files(path)):
        model, info = getattr(transformers, auto_class).from_pretrained(
            path, dtype=dtype, trust_remote_code=config.trust_remote_code, output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            use_safetensors=None if config.trust_pickled_weights else True, **extra)
    unread = complete.unread(model, read, local_folder(path))
    complete.check_complete(model, info, path, r"^score\." if is_new else None, unread)
    model.unread_tensors = {} if "num_labels" in extra else unread  # for exports to copy
    model.dequantised_by = extra["quantization_config"] if dequantise else None  # for exports
    if config.dtype == "auto":  # the dtype of exports, whatever the device of training
        stored = settings.dtype or settings.get_text_config().dtype
        model.file_dtype = stored or weights.float_dtype(local_folder(path))
    return quantize.settle(model, path, dtype) if config.quantize else model.to(device)


def local_folder(path: str) -> Path:
    """The folder with the files of the model at `path`: `path` itself, or the downloaded snapshot of a hub id."""
    from transformers.utils import cached_file

    return Path(path) if folder_files.is_local(path) else Path(cached_file(path, folder_files.CONFIG)).parent


def named_attention(config: ModelConfig, settings) -> dict[str, str]:  # noqa: ANN001 - a transformers class
    """The attention option for a model of transformers' configuration `settings`; empty where transformers chooses.
    Eager where scores are soft-capped: transformers before 5.21 takes sdpa for Gemma 2, which ignores the cap.
    """
    if config.attn_implementation != "auto":
        return {"attn_implementation": config.attn_implementation}
    is_capped = getattr(settings.get_text_config(), "attn_logit_softcapping", None) is not None
    return {"attn_implementation": "eager"} if is_capped else {}


@contextmanager
def _only_errors() -> Iterator[None]:
    """Within the block transformers shows no progress and logs nothing but errors."""
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)


def random_causal_lm(config: ModelConfig, tokenizer, seed: int) -> nn.Module:  # noqa: ANN001
    """A causal model from scratch in the shape of `config.preset`, seeded, with the tokenizer's special ids."""
    kind, shape = PRESETS[config.preset]
    special = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    return random_model(kind, shape | special | {"vocab_size": len(tokenizer)}, seed)


def random_model(kind: str, shape: dict, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A causal model from scratch on torch's default device. kind: transformers' model_type; shape: its settings."""
    from transformers import AutoConfig, AutoModelForCausalLM

    card = torch.get_default_device()
    with torch.random.fork_rng(devices=[card] if card.type == "cuda" else []):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape), dtype=dtype)


def prepare(model: nn.Module, config: ModelConfig, vocab_size: int) -> nn.Module:
    """Resize the embeddings for added tokens, freeze towers and `freeze`, turn on checkpointing. In place."""
    if vocab_size > model.get_input_embeddings().num_embeddings:
        with _only_errors():  # no long note on how new rows are drawn
            model.resize_token_embeddings(vocab_size)  # new rows near the mean: unlikely until trained
    is_of_text = reads_text(model)
    for name, parameter in model.named_parameters():
        if config.freeze_vision and not is_of_text(name):  # text gives them no gradient
            parameter.requires_grad_(False)
    for pattern in config.freeze:
        matches = [p for n, p in model.named_parameters() if re.search(pattern, n)]
        check(bool(matches), f"model.freeze pattern {pattern!r} matches no parameter of {type(model).__name__}, "
                             f"whose first is {next(iter(model.named_parameters()))[0]}; "
                             "give a pattern that matches some")
        for parameter in matches:
            parameter.requires_grad_(False)
    check(any(p.requires_grad for p in model.parameters()), "model.freeze freezes every parameter; nothing is trained")
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def read_settings(path: str, trust_remote_code: bool = False):  # noqa: ANN201 - a transformers class
    """transformers' configuration of any kind of model, at a hub id or folder. UserError where it cannot be read."""
    from transformers import AutoConfig

    if folder_files.is_local(path):
        folder_files.check_config(path)
    hint = folder_files.LIKE_SAVED if folder_files.is_local(path) else hub.advice(path)
    with folder_files.refusing(f"cannot read the configuration of {folder_files.config_of(path)}", hint):
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)  # None would prompt


def as_published(path: str, dtype: str = "auto") -> ModelConfig:
    """The config that loads the model at `path` in its published form: in 4 or 8 bits, where its files are."""
    bits = complete.packed_as(read_settings(path))[1]
    return ModelConfig(path, dtype=dtype, load_in_4bit=bits == "4bit", load_in_8bit=bits == "8bit")


def read_generation(path: str):  # noqa: ANN201 - a transformers class
    """transformers' generation config at a hub id or folder, or None where it has none."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None


def _empty(auto_class: str, config: ModelConfig, settings, **named: object) -> nn.Module:  # noqa: ANN001
    """The model of transformers' configuration `settings` on the meta device: modules and shapes, without weights."""
    import transformers
    from transformers.initialization import no_init_weights

    described, settings = folder_files.config_of(config.model_name_or_path), copy.deepcopy(settings)
    settings.num_labels = named.pop("num_labels", settings.num_labels)
    with (_only_errors(), no_init_weights(), torch.device("meta"),
          folder_files.refusing(f"cannot build the model of {described} by {auto_class}", _LOADABLE)):
        return getattr(transformers, auto_class).from_config(
            settings, trust_remote_code=config.trust_remote_code, **named)


def max_positions(model: nn.Module) -> int | None:
    """The longest sequence the model has positions for, or None where there is no bound."""
    size = positions_of(model.config)
    # RoBERTa-like models start after the padding's position: 514 positions are those of 512 tokens.
    paddings = (getattr(module, "padding_idx", None) for name, module in model.named_modules()
                if name.endswith("position_embeddings"))
    first = next((index + 1 for index in paddings if index is not None), 0)
    return size and size - first


def check_lora(config: ModelConfig, option: str | None = None) -> None:
    """UserError for adapters that would match no layer, and for quantised weights (set by `option`) without adapters to
    train.

    Reads only the configuration: the layers are those of a model on the meta device.
    """
    check(not config.quantize or config.lora.r,
          f"{option or f'model.load_in_{config.quantize}'}: a quantised base cannot be fully fine-tuned; set "
          "model.lora.r (such as 16), or leave it out")
    if config.lora.r and config.model_name_or_path and config.lora.target_modules != "all-linear":
        settings = read_settings(config.model_name_or_path, config.trust_remote_code)
        check_targets(_empty(causal_class(settings), config, settings), config.lora)


def configured_positions(config: ModelConfig) -> int | None:
    """The number of positions of the model that `config` names, from its configuration alone."""
    if config.preset:
        return PRESETS[config.preset][1]["max_position_embeddings"]
    return positions_of(configuration(config))


def positions_of(settings) -> int | None:  # noqa: ANN001 - a transformers class
    """The positions of a configuration, or None where there is no bound. For LongRoPE (Phi-3, Phi-4-mini) those before
    the switch: with a longer row transformers changes the frequencies of all rows of a batch, and of a sequence's later
    tokens but not of those in its cache, so that no two forwards would agree."""
    text = settings.get_text_config()
    size, rope = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # of all layers, or of each kind
    switches = [part["original_max_position_embeddings"] for part in parts if part.get("rope_type") == "longrope"]
    return min(switches, default=size)


def describe_positions(settings) -> str:  # noqa: ANN001 - a transformers class
    """`4096 positions`, for messages, with the reason where they are fewer than the configuration says."""
    size = positions_of(settings)
    is_fewer = size != getattr(settings.get_text_config(), "max_position_embeddings", None)
    return f"{size} positions" + " before the frequencies of its LongRoPE change" * is_fewer


def configuration(config: ModelConfig):  # noqa: ANN201 - a transformers class
    """transformers' configuration of the model at a hub id or folder; reads no weights. UserError for what cannot be
    trained here: encoder-decoders, weights in a foreign quantised format."""
    check((path := config.model_name_or_path) is not None,
          "no model: give model.model_name_or_path (hub id or folder) or model.preset")
    check_folder(path, ("weights",), config.trust_pickled_weights)
    settings = read_settings(path, config.trust_remote_code)
    check(not getattr(settings, "is_encoder_decoder", False),
          f"{path} is an encoder-decoder ({settings.model_type}); a causal language model is needed")
    complete.check_plain_weights(settings, path, config.quantize)
    return settings
