"""Make a tiny image-text model from scratch, in Qwen3-VL's architecture: random weights, its processor's files, a
tokenizer trained on the example's texts. A real checkpoint (Qwen/Qwen3-VL-2B-Instruct) takes its place on a card.

    python examples/vision/make_model.py outputs/vision/model
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]
TEXTS = ["user assistant Describe it. What colour is it? a red green blue yellow circle square triangle",
         "red\ngreen\nblue\nyellow\n"] * 20  # without a space before them they begin an answer, as one token each
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif -%}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   clean_up_tokenization_spaces=False,
                                   extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
                                                         "vision_bos_token": "<|vision_start|>",
                                                         "vision_eos_token": "<|vision_end|>"})
    made.chat_template = TEMPLATE
    return made


def make(folder: Path, seed: int = 0, width: int = 64, num_layers: int = 3, pixels: int = 32) -> None:
    """pixels: a side of the pictures, of which every 8 are a token."""
    words = tokenizer()
    ids = {name: words.convert_tokens_to_ids(token) for name, token in (
        ("image_token_id", "<|image_pad|>"), ("video_token_id", "<|video_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"), ("vision_end_token_id", "<|vision_end|>"))}
    text = dict(model_type="qwen3_vl_text", vocab_size=len(words), hidden_size=width, intermediate_size=3 * width,
                num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2, head_dim=width // 4,
                max_position_embeddings=512, initializer_range=0.06, tie_word_embeddings=True,
                rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_interleaved=True,
                                     mrope_section=[width // 16, width // 32, width // 32]),
                eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id, bos_token_id=None)
    vision = dict(model_type="qwen3_vl", depth=2, hidden_size=64, intermediate_size=128, num_heads=4, patch_size=4,
                  spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=width,
                  num_position_embeddings=(pixels // 4) ** 2,
                  deepstack_visual_indexes=[0], in_channels=3, initializer_range=0.06)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(
        "qwen3_vl", text_config=text, vision_config=vision, tie_word_embeddings=True, **ids), dtype=torch.float32)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(dict(
        image_processor_type="Qwen2VLImageProcessorFast", processor_class="Qwen3VLProcessor", patch_size=4,
        temporal_patch_size=2, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        size=dict(shortest_edge=pixels**2, longest_edge=pixels**2)), indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    make(asked.folder, asked.seed)
