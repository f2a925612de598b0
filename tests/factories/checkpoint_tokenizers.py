"""Tokenizers of published model families: the real names and order of their special tokens, their class and the rules
of their files, over a byte-level (or, for Gemma, sentencepiece-like) BPE trained on a few lines.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.factories.tiny import TEXTS


@dataclass(frozen=True)
class Family:
    """first: special tokens before the vocabulary, by id. last: behind it. words: added behind those, and not special.

    begins: whether encoding puts bos before a text. config: further lines of tokenizer_config.json.
    """

    tokenizer_class: str
    eos: str
    bos: str | None = None
    pad: str | None = None
    unk: str | None = None
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    begins: bool = False
    is_pieces: bool = False
    config: tuple[tuple[str, object], ...] = ()


def _reserved(pattern: str, numbers: range) -> tuple[str, ...]:
    return tuple(pattern.format(n) for n in numbers)


_QWEN_LAST = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
              "<|box_start|>",
              "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
              "<|image_pad|>", "<|video_pad|>")
_QWEN_WORDS = ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
               "<|repo_name|>", "<|file_sep|>")
_THOUGHTS = ("<tool_response>", "</tool_response>", "<think>", "</think>")
_LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
           "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>",
           "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", *_reserved("<|reserved_special_token_{}|>", range(3, 6)))
_TEKKEN = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
           "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
           "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", *_reserved("<SPECIAL_{}>", range(20,
                                                                                                                 32)),
           "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", *_reserved("<SPECIAL_{}>", range(36, 40)))
_GPT2 = dict(tokenizer_class="GPT2Tokenizer", config=(("add_prefix_space", False),))

FAMILIES: dict[str, Family] = {
    "qwen2": Family("Qwen2Tokenizer", "<|im_end|>", pad="<|endoftext|>", last=_QWEN_LAST, words=_QWEN_WORDS),
    "qwen3": Family("Qwen2Tokenizer", "<|im_end|>", pad="<|endoftext|>", last=_QWEN_LAST,
                    words=_QWEN_WORDS + _THOUGHTS),
    "qwen3_5": Family("Qwen2Tokenizer", "<|im_end|>", pad="<|endoftext|>",
                      last=(*_QWEN_LAST, "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>",
                            "<tts_text_eod>",
                            "<tts_text_bos_single>", "<|audio_pad|>"), words=_QWEN_WORDS + _THOUGHTS),
    "gemma3": Family("GemmaTokenizer", "<eos>", "<bos>", "<pad>", "<unk>", begins=True, is_pieces=True,
                     first=("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *_reserved("<unused{}>", range(4))),
                     last=("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>",
                           "<image_soft_token>"),
                     config=(("processor_class", "Gemma3Processor"), ("boi_token", "<start_of_image>"),
                             ("eoi_token", "<end_of_image>"), ("image_token", "<image_soft_token>"))),
    "gemma4": Family("GemmaTokenizer", "<eos>", "<bos>", "<pad>", "<unk>", begins=True, is_pieces=True,
                     first=("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *_reserved("<unused{}>", range(4))),
                     last=("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>",
                           '<|"|>', "<|think|>", "<|channel>", "<channel|>", "<|turn>", "<turn|>", "<|image>",
                           "<|audio>", "<|image|>", "<|audio|>", "<image|>", "<audio|>", "<|video|>"),
                     config=(("processor_class", "Gemma4Processor"), ("padding_side", "left"),
                             ("image_token", "<|image|>"), ("boi_token", "<|image>"), ("eoi_token", "<image|>"),
                             ("audio_token", "<|audio|>"), ("boa_token", "<|audio>"), ("eoa_token", "<audio|>"),
                             ("video_token", "<|video|>"))),
    "llama3": Family("PreTrainedTokenizerFast", "<|eot_id|>", "<|begin_of_text|>", "<|finetune_right_pad_id|>",
                     last=_LLAMA3, begins=True),
    "llama3_base": Family("PreTrainedTokenizerFast", "<|end_of_text|>", "<|begin_of_text|>", last=_LLAMA3, begins=True),
    "llama4": Family("PreTrainedTokenizerFast", "<|eot|>", "<|begin_of_text|>", "<|finetune_right_pad|>", begins=True,
                     last=("<|begin_of_text|>", "<|end_of_text|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
                           "<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", "<|step|>", "<|python_start|>",
                           "<|python_end|>", "<|finetune_right_pad|>", "<|image_start|>", "<|image_end|>",
                           "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>", "<|patch|>"),
                     config=(("processor_class", "Llama4Processor"),)),
    "mistral": Family("LlamaTokenizerFast", "</s>", "<s>", "<pad>", "<unk>", first=_TEKKEN, begins=True,
                      config=(("processor_class", "PixtralProcessor"), ("legacy", True))),
    "ministral": Family("TokenizersBackend", "</s>", "<s>", "<pad>", "<unk>", first=_TEKKEN, begins=True,
                        config=(("processor_class", "PixtralProcessor"),)),
    "gpt_oss": Family("PreTrainedTokenizerFast", "<|return|>", "<|startoftext|>", "<|endoftext|>",
                      last=("<|startoftext|>", "<|endoftext|>", "<|reserved_200000|>", "<|reserved_200001|>",
                            "<|return|>",
                            "<|constrain|>", "<|reserved_200004|>", "<|channel|>", "<|start|>", "<|end|>",
                            "<|message|>",
                            "<|reserved_200009|>", "<|call|>", "<|endofprompt|>")),
    "deepseek_v3": Family("LlamaTokenizerFast", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜▁pad▁｜>",
                          first=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"),
                          last=("<｜User｜>", "<｜Assistant｜>", "<|EOT|>", "<｜tool▁calls▁begin｜>",
                                "<｜tool▁calls▁end｜>",
                                "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>",
                                "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
                                "<｜tool▁sep｜>"),
                          begins=True, config=(("legacy", True),)),
    "glm4": Family("PreTrainedTokenizer", "<|endoftext|>", pad="<|endoftext|>",
                   last=("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>",
                         "<|assistant|>", "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>"),
                   words=("/nothink", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
                          "</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
                   config=(("remove_space", False), ("padding_side", "left"))),
    "smollm3": Family("PreTrainedTokenizerFast", "<|im_end|>", "<|begin_of_text|>", "<|im_end|>",
                      last=("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|im_start|>",
                            "<|im_end|>"), words=("<think>", "</think>", "<tool_call>", "</tool_call>")),
    "phi4_mini": Family("GPT2TokenizerFast", "<|endoftext|>", "<|endoftext|>", "<|endoftext|>", "<|endoftext|>",
                        last=("<|endoftext|>", "<|assistant|>", "<|system|>", "<|user|>", "<|end|>", "<|tool|>",
                              "<|/tool|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>", "<|tag|>")),
    "granite4": Family(eos="<|end_of_text|>", bos="<|end_of_text|>", pad="<|pad|>", unk="<|unk|>",
                       last=("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>", "<|pad|>",
                             "<|unk|>"),
                       words=("<tool_call>", "</tool_call>", "<tools>", "</tools>"), **_GPT2),
    "lfm2": Family("PreTrainedTokenizerFast", "<|im_end|>", "<|startoftext|>", "<|pad|>", begins=True,
                   first=("<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|fim_pre|>", "<|fim_mid|>", "<|fim_suf|>",
                          "<|im_start|>", "<|im_end|>", "<|tool_list_start|>", "<|tool_list_end|>",
                          "<|tool_call_start|>",
                          "<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>")),
    "olmo3": Family(eos="<|endoftext|>", bos="<|endoftext|>", pad="<|pad|>", unk="<|endoftext|>",
                    last=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<functions>", "</functions>",
                          "<function_calls>",
                          "</function_calls>", "<|pad|>"), **_GPT2),
    "nemotron": Family("PreTrainedTokenizerFast", "<|im_end|>", "<s>", unk="<unk>",
                       first=("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                              "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "<|im_start|>", "<|im_end|>",
                              "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
                              "</tool_response>", *_reserved("<SPECIAL_{}>", range(18, 22)))),
    "falcon_h1": Family("PreTrainedTokenizerFast", "<|end_of_text|>", "<|begin_of_text|>", "<|pad|>",
                        first=("<|pad|>", ">>ABSTRACT<<", ">>INTRODUCTION<<", ">>SUMMARY<<", ">>COMMENT<<",
                               ">>ANSWER<<",
                               ">>QUESTION<<", ">>DOMAIN<<", ">>PREFIX<<", ">>SUFFIX<<", ">>MIDDLE<<",
                               "<|end_of_text|>",
                               "<|begin_of_text|>", "<|im_start|>", "<|im_end|>")),
}


def vocabulary(family: Family) -> dict[str, int]:
    """Every token of the family's tiny tokenizer with its id."""
    return _backend(family).get_vocab()


def write_tokenizer(family: Family, folder: Path, template: str | None, in_config: bool) -> None:
    """tokenizer.json, tokenizer_config.json and special_tokens_map.json, and the template in a file of its own or, as
    older ones are published, in the configuration (in_config)."""
    backend = _backend(family)
    backend.save(str(folder / "tokenizer.json"))
    named = {f"{name}_token": value for name, value in
             (("bos", family.bos), ("eos", family.eos), ("pad", family.pad), ("unk", family.unk))}
    ids = backend.get_vocab()
    decoder = {str(ids[token]): dict(content=token, lstrip=False, normalized=False, rstrip=False, single_word=False,
                                     special=token not in family.words)
               for token in sorted((*family.first, *family.last, *family.words), key=ids.__getitem__)}
    config = dict(family.config) | named | dict(
        add_bos_token=family.begins, added_tokens_decoder=decoder, clean_up_tokenization_spaces=False,
        model_max_length=131072, tokenizer_class=family.tokenizer_class)
    if template is not None and in_config:
        config["chat_template"] = template
    elif template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    for name, value in (("tokenizer_config", config), ("special_tokens_map", {k: v for k, v in named.items() if v})):
        (folder / f"{name}.json").write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tekken(folder: Path) -> None:
    """tekken.json, the only tokenizer file beside Mistral Small 3.2."""
    tokens = [bytes([n]) for n in range(256)] + [b"th", b"er", b"on", b" the"]
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
             for rank, token in enumerate(tokens)]
    special = [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(_TEKKEN)]
    config = dict(pattern=r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
                  num_vocab_tokens=len(vocab), default_vocab_size=len(vocab) + len(special),
                  default_num_special_tokens=len(special), version="v11")
    (folder / "tekken.json").write_text(json.dumps(dict(config=config, vocab=vocab, special_tokens=special)))


@cache
def _backend(family: Family):  # noqa: ANN202 - of tokenizers
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    if family.is_pieces:
        vocab, merges = _trained(is_bytes=False)
        table = [*family.first, *(f"<0x{n:02X}>" for n in range(256)), *vocab]
        backend = Tokenizer(models.BPE({t: i for i, t in enumerate(table)}, merges, unk_token=family.unk, fuse_unk=True,
                                       byte_fallback=True))
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        vocab, merges = _trained(is_bytes=True)
        backend = Tokenizer(models.BPE({t: i for i, t in enumerate([*family.first, *vocab])}, merges))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (*family.first, *family.last)])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in family.words])
    if family.begins:
        bos = backend.token_to_id(family.bos)
        backend.post_processor = processors.TemplateProcessing(
            f"{family.bos}:0 $A:0", f"{family.bos}:0 $A:0 {family.bos}:1 $B:1", [(family.bos, bos)])
    return backend


@cache
def _trained(is_bytes: bool) -> tuple[list[str], list[tuple[str, str]]]:
    """The tokens and merges of a BPE over bytes (or characters), in the order of their ids."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    if is_bytes:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        backend.normalizer, alphabet = normalizers.Replace(" ", "▁"), ["▁", *map(chr, range(33, 127)), "\n"]
    size = len(alphabet) + 24
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=size, initial_alphabet=sorted(alphabet),
                                                           show_progress=False))
    model = json.loads(backend.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].__getitem__), [tuple(m) for m in model["merges"]]
