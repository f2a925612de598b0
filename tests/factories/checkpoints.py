"""Folders of today's checkpoints exactly as published, but tiny, random and seeded: configuration, names and dtypes of
the weights (towers, multi-token prediction and packed ones included), tokenizer, chat template, sampling defaults and
the processor's files. `write(name, folder)` makes one of `CHECKPOINTS`.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.factories import checkpoint_configs as configs
from tests.factories import checkpoint_packing as packing
from tests.factories.checkpoint_configs import Id
from tests.factories.checkpoint_tokenizers import FAMILIES, vocabulary, write_tekken, write_tokenizer

Weights = dict[str, Tensor]
_SHARDED = "model-{:05d}-of-{:05d}.safetensors"
_FLOAT32 = re.compile(r"e_score_correction_bias$|linear_attn\.(A_log|norm\.weight)$")


@dataclass(frozen=True)
class Checkpoint:
    """One published checkpoint. source: the hub id whose files it is shaped after. template: of TRL's (trl:NAME) or of
    checkpoint_templates. names: what transformers' names of the weights are replaced by, in that order. change: what
    the file has beside or instead of the model's weights. in_config: the template is a line of the tokenizer's
    configuration. files: further ones, by name. is_untied: the output head is in the files although the configuration,
    as transformers reads it, ties it to the embeddings. loads_in_4bit: it is packed by bitsandbytes, and has to be
    trained with model.load_in_4bit.
    """

    source: str
    config: Mapping
    family: str | None
    template: str | None
    generation: Mapping
    names: tuple[tuple[str, str], ...] = ()
    change: Callable[[Weights], Weights] | None = None
    shards: str | None = None
    in_config: bool = False
    is_untied: bool = False
    loads_in_4bit: bool = False
    files: Mapping[str, object] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        return self.config["architectures"][0]


def write(name: str, folder: str | Path, seed: int = 0) -> str:
    """The folder of a published checkpoint at `folder`, made; returns it as a string."""
    checkpoint, folder = CHECKPOINTS[name], Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ids = {} if checkpoint.family is None else vocabulary(FAMILIES[checkpoint.family])
    if checkpoint.family is None:
        write_tekken(folder)
    else:
        write_tokenizer(FAMILIES[checkpoint.family], folder, _template(checkpoint.template), checkpoint.in_config)
    files = {"config.json": checkpoint.config, "generation_config.json": checkpoint.generation, **checkpoint.files}
    for file, content in files.items():
        if not isinstance(content, str):
            content = json.dumps(_resolved(content, ids), indent=2, ensure_ascii=False) + "\n"
        (folder / file).write_text(content, encoding="utf-8")
    _write_weights(checkpoint, folder, seed)
    return str(folder)


def missing(name: str) -> str | None:
    """Why the installed transformers cannot build this one; None if it can."""
    import transformers

    architecture = CHECKPOINTS[name].architecture
    return None if hasattr(transformers,
                           architecture) else f"transformers {transformers.__version__} has no {architecture}"


def _resolved(value: object, ids: Mapping[str, int]) -> object:
    if isinstance(value, Id):
        return ids[value]
    if isinstance(value, Mapping):
        return {k: _resolved(v, ids) for k, v in value.items()}
    return [_resolved(v, ids) for v in value] if isinstance(value, (list, tuple)) else value


def _template(name: str | None) -> str | None:
    if name is None or not name.startswith("trl:"):
        return name and (Path(__file__).parent / "checkpoint_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    from tests.factories.trl_templates import template_of

    return template_of(name.removeprefix("trl:"))


# -- weights -----------------------------------------------------------------------------------------------------------


def _write_weights(checkpoint: Checkpoint, folder: Path, seed: int) -> None:
    weights = {}
    for name, weight in _plain(checkpoint, folder, seed).items():
        for pattern, replacement in checkpoint.names:
            name = re.sub(pattern, replacement, name)
        weights[name] = weight
    torch.manual_seed(seed + 1)
    weights = weights if checkpoint.change is None else checkpoint.change(weights)
    weights = {name: w.contiguous() for name, w in weights.items()}
    if checkpoint.shards is None:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return
    names, files = list(weights), [checkpoint.shards.format(n, 2) for n in (1, 2)]
    parts = names[: len(names) // 2], names[len(names) // 2:]
    for file, part in zip(files, parts, strict=True):
        save_file({name: weights[name] for name in part}, folder / file, {"format": "pt"})
    size = sum(w.numel() * w.element_size() for w in weights.values())
    index = dict(metadata=dict(total_size=size),
                 weight_map={name: file for file, part in zip(files, parts, strict=True) for name in part})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _plain(checkpoint: Checkpoint, folder: Path, seed: int) -> Weights:
    """Random weights of the architecture by the names that transformers saves them under."""
    import transformers

    with tempfile.TemporaryDirectory() as scratch:
        settings = json.loads((folder / "config.json").read_text())
        settings.pop("quantization_config", None)
        (Path(scratch) / "config.json").write_text(json.dumps(settings))
        config = transformers.AutoConfig.from_pretrained(scratch)
        config.tie_word_embeddings = config.tie_word_embeddings and not checkpoint.is_untied
        torch.manual_seed(seed)
        with _silent():
            model = getattr(transformers, checkpoint.architecture)(config)
            for name, weight in model.named_parameters():
                weight.data = _random(name, weight.data)
            model.to(torch.bfloat16).save_pretrained(scratch)
        weights = load_file(Path(scratch) / "model.safetensors")
    return {name: w.float() if _FLOAT32.search(name) else w for name, w in weights.items()}


def _random(name: str, weight: Tensor) -> Tensor:
    """As wide as tests.factories.architectures has it, so that greedy tokens depend on attention."""
    if weight.ndim >= 2 and "A_log" not in name:
        return torch.randn(weight.shape) * (0.5 if "embed" in name else weight.shape[-1] ** -0.5)
    return torch.randn(weight.shape) * 0.1 if "bias" in name or "sink" in name else weight


class _silent:  # noqa: N801 - a context
    """transformers shows no progress and says nothing but errors within."""

    def __enter__(self) -> None:
        import transformers

        self.level = transformers.logging.get_verbosity()
        transformers.logging.disable_progress_bar()
        transformers.logging.set_verbosity_error()

    def __exit__(self, *_error: object) -> None:
        import transformers

        transformers.logging.set_verbosity(self.level)


def _like(weights: Weights, layer: str, name: str) -> Weights:
    """Random weights shaped as those of `layer`, under another layer's name."""
    return {name + k.removeprefix(layer): _random(k, torch.ones(w.shape)).to(w.dtype)
            for k, w in weights.items() if k.startswith(layer)}


def _with_mtp(weights: Weights) -> Weights:
    """Beside a Qwen3.5: the layer for multi-token prediction, which transformers does not build."""
    layer = _like(weights, "model.language_model.layers.1.", "mtp.layers.0.")
    norms = {f"mtp.{n}.weight": torch.randn(32).bfloat16() for n in ("norm", "pre_fc_norm_embedding",
                                                                     "pre_fc_norm_hidden")}
    return weights | layer | norms | {"mtp.fc.weight": torch.randn(32, 64).bfloat16()}


def _experts_together(weights: Weights) -> Weights:
    """Qwen3.5's experts, which are published as one tensor each of (experts, 2 x inner, H) and (experts, H, inner)."""
    together: Weights = {}
    for name, weight in weights.items():
        before, expert, part = re.fullmatch(r"(.*\.experts\.)(\d+)\.(\w+)_proj\.weight", name).groups() if (
            ".experts." in name) else (name, None, None)
        if expert is None:
            together[name] = weight
        elif part == "down":
            together.setdefault(f"{before}down_proj", []).append(weight)
        elif part == "gate":
            up = weights[f"{before}{expert}.up_proj.weight"]
            together.setdefault(f"{before}gate_up_proj", []).append(torch.cat([weight, up]))
    return {name: torch.stack(w) if isinstance(w, list) else w for name, w in together.items()}


def _with_unused_keys(weights: Weights) -> Weights:
    """Beside a Gemma 4 with layers that share keys and values: those layers' own, which are published and never read;
    and the bounds of its clipped layers, which have no dimensions and are finite."""
    bounds = {name: w.sign().nan_to_num() * 8 for name, w in weights.items() if w.ndim == 0}
    unused = {}
    for name, weight in weights.items():
        if layer := re.search(r"language_model\.layers\.([01])\.self_attn\.(k_proj|v_proj|k_norm)\.weight", name):
            own = name.replace(f"layers.{layer[1]}.", f"layers.{int(layer[1]) + 2}.")
            unused[own] = _random(own, torch.ones(weight.shape)).to(weight.dtype)
    return weights | bounds | unused


def _with_next_layer(weights: Weights, number: int) -> Weights:
    """Beside a DeepSeek-V3 or a GLM-4.6: the layer for multi-token prediction, numbered behind the published ones."""
    name = f"model.layers.{number}."
    layer = _like(weights, "model.layers.1.", name)
    norms = {f"{name}{n}.weight": torch.randn(32).bfloat16() for n in ("enorm", "hnorm", "shared_head.norm")}
    return weights | layer | norms | {
        f"{name}eh_proj.weight": torch.randn(32, 64).bfloat16(),
        f"{name}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        f"{name}shared_head.head.weight": weights["lm_head.weight"].clone()}


# -- files -------------------------------------------------------------------------------------------------------------

_RAISES = 'raise ImportError("the code of a checkpoint that transformers builds itself is not to be run")\n'
_CODE = {name: {f"configuration_{name}.py": _RAISES, f"modeling_{name}.py": _RAISES}
         for name in ("deepseek", "phi3", "nemotron_h")}
_QWEN_IMAGES = {
    "preprocessor_config.json": dict(
        size=dict(longest_edge=16777216, shortest_edge=65536), patch_size=4, temporal_patch_size=2, merge_size=2,
        image_mean=[0.5] * 3, image_std=[0.5] * 3, processor_class="Qwen3VLProcessor",
        image_processor_type="Qwen2VLImageProcessorFast"),
    "video_preprocessor_config.json": dict(
        size=dict(longest_edge=25165824, shortest_edge=4096), patch_size=4, temporal_patch_size=2, merge_size=2,
        image_mean=[0.5] * 3, image_std=[0.5] * 3, processor_class="Qwen3VLProcessor",
        video_processor_type="Qwen3VLVideoProcessor")}
_GEMMA3_FILES = {
    "preprocessor_config.json": dict(
        do_convert_rgb=None, do_normalize=True, do_pan_and_scan=None, do_rescale=True, do_resize=True,
        image_mean=[0.5] * 3, image_processor_type="Gemma3ImageProcessor", image_seq_length=4, image_std=[0.5] * 3,
        pan_and_scan_max_num_crops=None, pan_and_scan_min_crop_size=None, pan_and_scan_min_ratio_to_activate=None,
        processor_class="Gemma3Processor", resample=2, rescale_factor=0.00392156862745098, size=dict(height=16,
                                                                                                     width=16)),
    "processor_config.json": dict(image_seq_length=4, processor_class="Gemma3Processor"),
    "added_tokens.json": {"<image_soft_token>": Id("<image_soft_token>")}}
_GEMMA4_FILES = {"processor_config.json": dict(
    audio_ms_per_token=40, audio_seq_length=750, image_seq_length=280, processor_class="Gemma4Processor",
    feature_extractor=dict(feature_extractor_type="Gemma4AudioFeatureExtractor", feature_size=128, sampling_rate=16000),
    image_processor=dict(image_processor_type="Gemma4ImageProcessor", patch_size=4, pooling_kernel_size=3,
                         max_soft_tokens=280, do_normalize=False),
    video_processor=dict(video_processor_type="Gemma4VideoProcessor", max_soft_tokens=70, num_frames=32))}
_LLAMA4_FILES = {
    "preprocessor_config.json": dict(
        image_processor_type="Llama4ImageProcessorFast", processor_class="Llama4Processor", max_patches=16,
        image_mean=[0.5] * 3, image_std=[0.5] * 3, size=dict(height=16, width=16), resize_to_max_canvas=False),
    "processor_config.json": dict(processor_class="Llama4Processor", patch_size=4, pixel_shuffle_ratio=0.5,
                                  fake_image_token="<|image|>", image_token="<|image|>")}
_PIXTRAL_FILES = {
    "preprocessor_config.json": dict(
        do_convert_rgb=True, do_normalize=True, do_rescale=True, do_resize=True, processor_class="PixtralProcessor",
        image_mean=[0.48145466, 0.4578275, 0.40821073], image_std=[0.26862954, 0.26130258, 0.27577711],
        image_processor_type="PixtralImageProcessorFast", patch_size=4, rescale_factor=0.00392156862745098,
        size=dict(longest_edge=16)),
    "processor_config.json": dict(image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]", image_token="[IMG]",
                                  patch_size=4, processor_class="PixtralProcessor", spatial_merge_size=2)}
_MINISTRAL_FILES = {"processor_config.json": dict(
    image_processor=_PIXTRAL_FILES["preprocessor_config.json"], **_PIXTRAL_FILES["processor_config.json"])}
_LLAVA = ((r"^model\.language_model\.", "language_model.model."), (r"^lm_head\.", "language_model.lm_head."),
          (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."))
_QWEN_ENDS = dict(bos_token_id=Id("<|endoftext|>"), do_sample=True, pad_token_id=Id("<|endoftext|>"),
                  eos_token_id=[Id("<|im_end|>"), Id("<|endoftext|>")])
_GEMMA4_ENDS = dict(bos_token_id=Id("<bos>"), do_sample=True, pad_token_id=Id("<pad>"), temperature=1.0, top_k=64,
                    top_p=0.95, eos_token_id=[Id("<eos>"), Id("<turn|>"), Id("<|tool_response>")],
                    transformers_version="5.5.0.dev0")
_MISTRAL_ENDS = dict(bos_token_id=1, eos_token_id=2, transformers_version="4.50.0.dev0")
_GPT_OSS_ENDS = dict(bos_token_id=Id("<|startoftext|>"), do_sample=True, pad_token_id=Id("<|endoftext|>"),
                     eos_token_id=[Id("<|return|>"), Id("<|endoftext|>"), Id("<|call|>")])
_DEEPSEEK_ENDS = dict(_from_model_config=True, bos_token_id=0, eos_token_id=1, do_sample=True, temperature=0.6,
                      top_p=0.95, transformers_version="4.39.3")

CHECKPOINTS: dict[str, Checkpoint] = {
    "qwen3_5": Checkpoint("Qwen/Qwen3.5-4B", configs.QWEN3_5, "qwen3_5", "trl:qwen3_5_think",
                          _QWEN_ENDS | dict(temperature=1.0, top_k=20, top_p=0.95), change=_with_mtp,
                          shards="model.safetensors-{:05d}-of-{:05d}.safetensors", files=_QWEN_IMAGES),
    "qwen3_5_moe": Checkpoint("Qwen/Qwen3.5-35B-A3B", configs.QWEN3_5_MOE, "qwen3_5", "trl:qwen3_5_think",
                              _QWEN_ENDS | dict(temperature=1.0, top_k=20, top_p=0.95),
                              change=lambda weights: _with_mtp(_experts_together(weights)),
                              shards="model.safetensors-{:05d}-of-{:05d}.safetensors", files=_QWEN_IMAGES),
    "gemma3": Checkpoint("google/gemma-3-4b-it", configs.GEMMA3, "gemma3", "trl:gemma3",
                         dict(bos_token_id=Id("<bos>"), cache_implementation="hybrid", do_sample=True, top_k=64,
                              eos_token_id=[Id("<eos>"), Id("<end_of_turn>")], pad_token_id=Id("<pad>"), top_p=0.95,
                              transformers_version="4.50.0.dev0"),
                         names=(*_LLAVA, (r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model.")),
                         in_config=True,
                         shards=_SHARDED, files=_GEMMA3_FILES),
    "gemma4": Checkpoint("google/gemma-4-E4B-it", configs.GEMMA4, "gemma4", "trl:gemma4_v5", _GEMMA4_ENDS,
                         change=_with_unused_keys, files=_GEMMA4_FILES),
    "gemma4_unified": Checkpoint("google/gemma-4-12B-it", configs.GEMMA4_UNIFIED, "gemma4", "trl:gemma4_v5",
                                 _GEMMA4_ENDS, files=_GEMMA4_FILES),
    "llama4": Checkpoint("meta-llama/Llama-4-Scout-17B-16E-Instruct", configs.LLAMA4, "llama4", "llama4",
                         dict(bos_token_id=Id("<|begin_of_text|>"), do_sample=True, temperature=0.6, top_p=0.9,
                              eos_token_id=[Id("<|end_of_text|>"), Id("<|eom|>"), Id("<|eot|>")],
                              pad_token_id=Id("<|finetune_right_pad|>"), transformers_version="4.51.0.dev0"),
                         in_config=True, shards=_SHARDED, files=_LLAMA4_FILES),
    "qwen3_vl": Checkpoint("Qwen/Qwen3-VL-4B-Instruct", configs.QWEN3_VL, "qwen3", "trl:qwen3_vl",
                           _QWEN_ENDS | dict(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.0),
                           shards=_SHARDED, files=_QWEN_IMAGES),
    "mistral_small_3_1": Checkpoint("mistralai/Mistral-Small-3.1-24B-Instruct-2503", configs.MISTRAL_SMALL, "mistral",
                                    "mistral_small", _MISTRAL_ENDS, names=_LLAVA, shards=_SHARDED, in_config=True,
                                    is_untied=True, files=_PIXTRAL_FILES),
    "mistral_small_3_2": Checkpoint("mistralai/Mistral-Small-3.2-24B-Instruct-2506",
                                    {**configs.MISTRAL_SMALL, "image_token_index": 10}, None, None, _MISTRAL_ENDS,
                                    names=_LLAVA, shards=_SHARDED, is_untied=True),
    "ministral3": Checkpoint("mistralai/Ministral-3-3B-Instruct-2512-BF16", configs.MINISTRAL, "ministral", "ministral",
                             dict(bos_token_id=1, eos_token_id=2, pad_token_id=11, max_length=262144,
                                  transformers_version="5.0.0.dev0"), names=_LLAVA, files=_MINISTRAL_FILES),
    "ministral3_fp8": Checkpoint("mistralai/Ministral-3-3B-Instruct-2512", configs.MINISTRAL_FP8, "ministral",
                                 "ministral", dict(bos_token_id=1, eos_token_id=2, pad_token_id=11, max_length=262144,
                                                   transformers_version="5.0.0.dev0"), names=_LLAVA,
                                 change=packing.fp8_per_tensor, files=_MINISTRAL_FILES),
    "gpt_oss": Checkpoint("unsloth/gpt-oss-20b-BF16", configs.GPT_OSS_BF16, "gpt_oss", "trl:gptoss", _GPT_OSS_ENDS,
                          shards=_SHARDED),
    "gpt_oss_mxfp4": Checkpoint("openai/gpt-oss-20b", configs.GPT_OSS_MXFP4, "gpt_oss", "trl:gptoss", _GPT_OSS_ENDS,
                                change=packing.mxfp4, shards=_SHARDED),
    "qwen3_moe": Checkpoint("Qwen/Qwen3-30B-A3B", configs.QWEN3_MOE, "qwen3", "trl:qwen3",
                            _QWEN_ENDS | dict(temperature=0.6, top_k=20, top_p=0.95), in_config=True, shards=_SHARDED),
    "deepseek_v3": Checkpoint("deepseek-ai/DeepSeek-V3", configs.DEEPSEEK_V3_FP8, "deepseek_v3", "trl:deepseekv3",
                              _DEEPSEEK_ENDS, in_config=True, shards=_SHARDED, files=_CODE["deepseek"],
                              change=lambda weights: packing.fp8_in_blocks(_with_next_layer(weights, 61))),
    "deepseek_v3_bf16": Checkpoint("unsloth/DeepSeek-V3-bf16", configs.DEEPSEEK_V3, "deepseek_v3", "trl:deepseekv3",
                                   _DEEPSEEK_ENDS, in_config=True, shards=_SHARDED, files=_CODE["deepseek"],
                                   change=lambda weights: _with_next_layer(weights, 61)),
    "glm4_6": Checkpoint("zai-org/GLM-4.6", configs.GLM4_6, "glm4", "trl:glm4moe",
                         dict(_from_model_config=True, pad_token_id=Id("<|endoftext|>"), temperature=1.0,
                              eos_token_id=[Id("<|endoftext|>"), Id("<|user|>"), Id("<|observation|>")],
                              transformers_version="4.56.2"),
                         shards=_SHARDED, change=lambda weights: _with_next_layer(weights, 92)),
    "smollm3": Checkpoint("HuggingFaceTB/SmolLM3-3B", configs.SMOLLM3, "smollm3", "smollm3",
                          dict(_from_model_config=True, bos_token_id=Id("<|begin_of_text|>"), do_sample=True,
                               eos_token_id=Id("<|im_end|>"), pad_token_id=Id("<|finetune_right_pad_id|>"),
                               temperature=0.6, top_p=0.95, transformers_version="4.54.0.dev0"), shards=_SHARDED),
    "phi4_mini": Checkpoint("microsoft/Phi-4-mini-instruct", configs.PHI4_MINI, "phi4_mini", "phi4_mini",
                            dict(_from_model_config=True, bos_token_id=Id("<|endoftext|>"),
                                 transformers_version="4.45.0",
                                 eos_token_id=[Id("<|end|>"), Id("<|endoftext|>")], pad_token_id=Id("<|endoftext|>")),
                            in_config=True, shards=_SHARDED, files=_CODE["phi3"]),
    "granite4_h": Checkpoint("ibm-granite/granite-4.0-h-tiny", configs.GRANITE4, "granite4", "granite4",
                             dict(_from_model_config=True, bos_token_id=Id("<|end_of_text|>"),
                                  pad_token_id=Id("<|pad|>"),
                                  eos_token_id=Id("<|end_of_text|>"), transformers_version="4.56.0"), shards=_SHARDED),
    "lfm2": Checkpoint("LiquidAI/LFM2-1.2B", configs.LFM2, "lfm2", "trl:lfm2_v2",
                       dict(_from_model_config=True, bos_token_id=Id("<|startoftext|>"), eos_token_id=Id("<|im_end|>"),
                            pad_token_id=Id("<|pad|>"), transformers_version="4.54.0.dev0")),
    "olmo3": Checkpoint("allenai/Olmo-3-7B-Instruct", configs.OLMO3, "olmo3", "olmo3",
                        dict(do_sample=True, eos_token_id=[Id("<|im_end|>"), Id("<|endoftext|>")], max_new_tokens=32768,
                             temperature=0.6, top_p=0.95, transformers_version="4.57.0.dev0"), shards=_SHARDED),
    "nemotron_h": Checkpoint("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", configs.NEMOTRON_H, "nemotron",
                             "trl:nemotron_3_nano",
                             dict(_from_model_config=True, bos_token_id=Id("<s>"), do_sample=True,
                                  pad_token_id=Id("<unk>"),
                                  eos_token_id=[Id("</s>"), Id("<|im_end|>")], transformers_version="4.55.4"),
                             shards=_SHARDED, files=_CODE["nemotron_h"]),
    "falcon_h1": Checkpoint("tiiuae/Falcon-H1-1.5B-Instruct", configs.FALCON_H1, "falcon_h1", "falcon_h1",
                            dict(_from_model_config=True, bos_token_id=Id("<|begin_of_text|>"),
                                 pad_token_id=Id("<|pad|>"),
                                 eos_token_id=[Id("<|end_of_text|>"), Id("<|im_end|>")], do_sample=True,
                                 temperature=0.1, transformers_version="4.52.0.dev0"), in_config=True),
    "llama3_2_base": Checkpoint("meta-llama/Llama-3.2-1B", configs.LLAMA3_2, "llama3_base", None,
                                dict(_from_model_config=True, bos_token_id=Id("<|begin_of_text|>"), do_sample=True,
                                     eos_token_id=[Id("<|end_of_text|>"), Id("<|eom_id|>"), Id("<|eot_id|>")],
                                     temperature=0.6, top_p=0.9, transformers_version="4.45.0.dev0")),
    "llama3_2_bnb_4bit": Checkpoint("unsloth/Llama-3.2-1B-Instruct-bnb-4bit", configs.LLAMA3_2_BNB, "llama3",
                                    "trl:llama3_2",
                                    dict(_from_model_config=True, bos_token_id=Id("<|begin_of_text|>"), do_sample=True,
                                         eos_token_id=[Id("<|end_of_text|>"), Id("<|eom_id|>"), Id("<|eot_id|>")],
                                         max_length=131072, pad_token_id=Id("<|finetune_right_pad_id|>"),
                                         temperature=0.6, top_p=0.9, transformers_version="4.52.0.dev0"),
                                    change=packing.bnb_4bit, loads_in_4bit=True),
    "qwen2_5_awq": Checkpoint("Qwen/Qwen2.5-7B-Instruct-AWQ", configs.AWQ, "qwen2", "trl:qwen2_5",
                              _QWEN_ENDS | dict(repetition_penalty=1.05, temperature=0.7, top_k=20, top_p=0.8),
                              in_config=True, shards=_SHARDED, change=packing.awq),
    "qwen2_5_gptq": Checkpoint("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", configs.GPTQ, "qwen2", "trl:qwen2_5",
                               _QWEN_ENDS | dict(repetition_penalty=1.05, temperature=0.7, top_k=20, top_p=0.8),
                               in_config=True, shards=_SHARDED, change=packing.gptq),
}
