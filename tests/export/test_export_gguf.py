"""GGUF files: tensors against the model's, and, where llama-cpp-python is installed, what llama.cpp says of them."""

from __future__ import annotations

import json
import math
import shutil
import weakref

import numpy as np
import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.export.gguf import check_convertible, interleaved, llama3_factors, write_gguf
from tests.factories.checkpoints import write
from tests.factories.tiny import TEXTS, save_tiny, tiny_config

TWO_KINDS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "factor": 4.0,
            "long_factor": [1.0, 2.0, 3.0, 4.0], "short_factor": [1.0, 1.1, 1.2, 1.3],
            "original_max_position_embeddings": 256}
YARN = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 32,
        "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1}  # as Olmo 3 has them
QWEN35 = {"head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
          "layer_types": ["linear_attention", "full_attention"],
          "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                              "mrope_section": [3, 3, 2]}}

KINDS = {"llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {"head_dim": 16},
         "llama with tied embeddings": {"tie_word_embeddings": True},
         "llama 3 rotary": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
                                                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                                "original_max_position_embeddings": 64}},
         "gemma3_text": TWO_KINDS | {
             "head_dim": 32, "query_pre_attn_scalar": 32,
             "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                                 "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}}},
         "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
         "phi3 longrope": {"max_position_embeddings": 1024, "original_max_position_embeddings": 256,
                           "rope_parameters": LONGROPE},
         "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
         "olmo2": {},
         "olmo3": TWO_KINDS | {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
                                                   "full_attention": YARN}},
         "granite": {"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
                     "logits_scaling": 4.0},
         "qwen3_5_text": QWEN35 | {"linear_num_value_heads": 4},
         "qwen3_5_text one value head a key": QWEN35 | {"linear_num_value_heads": 2}}
# llama.cpp wants head sizes that its kernels know
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, changes in KINDS.items():
        folder = tmp_path_factory.mktemp("gguf") / name.replace(" ", "_")
        made[name] = save_tiny(folder, kind=name.split()[0], initializer_range=0.15, **(SHAPE | changes))
        _unequal_vectors(folder / "model.safetensors")
    return made


def _unequal_vectors(path) -> None:
    """Norms of all ones and biases of all zeros would hide which is which."""
    from safetensors.torch import load_file, save_file

    torch.manual_seed(1)
    weights = {name: value + 0.3 * torch.randn_like(value) if value.ndim == 1 else value
               for name, value in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})


def test_queries_of_llama_go_from_halves_to_neighbours():
    weight = torch.arange(8.0)[:, None]  # two heads of four rows
    assert interleaved(weight, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_llama3_factors_are_transformers_frequencies():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = tiny_config(**SHAPE, rope_parameters=KINDS["llama 3 rotary"]["rope_parameters"])
    ours = llama3_factors(config.rope_parameters, 16)
    plain = np.array([10000.0 ** -(i / 16) for i in range(0, 16, 2)])
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    np.testing.assert_allclose(plain / ours, frequencies.numpy(), rtol=1e-6)
    assert ours[0] == 1
    assert math.isclose(ours[-1], 8)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_file_holds_every_weight_and_the_vocabulary(folders, kind, tmp_path):
    import gguf
    from safetensors.torch import load_file

    (tmp_path / "m.gguf.tmp").write_text("the user's")
    path = write_gguf(folders[kind], tmp_path / "m.gguf", "f32")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "m.gguf.tmp"]
    read = gguf.GGUFReader(path)
    tensors = {t.name: t for t in read.tensors}
    weights = load_file(f"{folders[kind]}/model.safetensors")
    assert len(tensors) == len(weights)
    np.testing.assert_array_equal(tensors["token_embd.weight"].data, weights["model.embed_tokens.weight"])
    np.testing.assert_array_equal(tensors["blk.1.ffn_down.weight"].data, weights["model.layers.1.mlp.down_proj.weight"])
    tokens = [bytes(read.fields["tokenizer.ggml.tokens"].parts[i]).decode()
              for i in read.fields["tokenizer.ggml.tokens"].data]
    assert tokens[:4] == ["<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert len(tokens) == 300


@pytest.mark.parametrize(("template", "end"), [("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
                                                "<|endoftext|>{% endfor %}", 1), (None, None)])
def test_a_turn_s_end_that_is_not_the_eos_token_is_named(template, end, folders, tmp_path):
    import gguf

    shutil.copytree(folders["qwen2"], tmp_path / "model")
    if template:
        (tmp_path / "model/chat_template.jinja").write_text(template)
    fields = gguf.GGUFReader(write_gguf(tmp_path / "model", tmp_path / "m.gguf", "f16")).fields
    assert int(fields["tokenizer.ggml.eos_token_id"].contents()) == 3
    eot = fields.get("tokenizer.ggml.eot_token_id")
    assert (eot and int(eot.contents())) == end
    assert "tokenizer.ggml.eom_token_id" not in fields


@pytest.mark.parametrize(("dtype", "bytes_each"), [("f16", 2), ("bf16", 2), ("q8_0", 34 / 32)])
def test_matrices_take_the_bytes_of_their_type(folders, dtype, bytes_each, tmp_path):
    import gguf

    path = write_gguf(folders["llama"], tmp_path / "m.gguf", dtype)
    down = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_down.weight")
    assert down.n_bytes == 64 * 128 * bytes_each


def test_a_head_of_its_own_is_written_though_the_configuration_ties_it(folders, tmp_path):
    """As an adapter on a tied head leaves it, merged by whomever."""
    import gguf
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(folders["llama with tied embeddings"], tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    head = weights["model.embed_tokens.weight"] + 1
    save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    read = gguf.GGUFReader(write_gguf(folder, tmp_path / "m.gguf", "f32"))
    np.testing.assert_array_equal({t.name: t.data for t in read.tensors}["output.weight"], head.numpy())


def test_what_has_no_form_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"a gpt2 model; GGUF export knows llama.*python convert_hf_to_gguf.py FOLDER"):
        check_convertible(save_tiny(tmp_path / "a", kind="gpt2"), "f16")
    with pytest.raises(UserError, match="--gguf q4_0: choose f32"):
        check_convertible(tmp_path / "a", "q4_0")
    folder = save_tiny(tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    (tmp_path / "b" / "config.json").write_text(json.dumps(
        config | {"rope_parameters": LONGROPE}))
    with pytest.raises(UserError, match="rotary scaling 'longrope'"):
        check_convertible(folder, "f16")
    tokenizer = json.loads((tmp_path / "b" / "tokenizer.json").read_text())
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": r"\w+"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False, "trim_offsets": True}]}
    (tmp_path / "b" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="splits text by"):
        write_gguf(folder, tmp_path / "c.gguf")
    assert not list(tmp_path.glob("c.gguf*"))


def _logits_of_llama_cpp(path, tokenizer, text: str, num_positions: int = 256) -> tuple[list[int], torch.Tensor]:
    """The ids of `text` by transformers' tokenizer, which must be llama.cpp's too, and llama.cpp's logits."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    theirs = llama_cpp.Llama(str(path), n_ctx=num_positions, n_threads=1, logits_all=True, verbose=False)
    ids = tokenizer(text).input_ids
    assert theirs.tokenize(text.encode(), add_bos=True, special=True) == ids
    theirs.eval(ids)
    return ids, torch.from_numpy(np.array(theirs.scores[: len(ids)]))


def _assert_close(model, ids: list[int], found: torch.Tensor) -> None:
    with torch.no_grad():
        ours = model(input_ids=torch.tensor([ids])).logits[0]
    assert float((ours - found).abs().max() / ours.abs().max()) < 5e-3  # llama.cpp rounds products' inputs
    assert torch.equal(ours.argmax(-1), found.argmax(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_computes_what_transformers_does(folders, kind, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = write_gguf(folders[kind], tmp_path / "m.gguf", "f32", "tiny")  # it wants </s> of what is named phi3
    tokenizer = AutoTokenizer.from_pretrained(folders[kind])
    text = "<|im_start|>user\nWho lived in a wood? It's 42 and 007!\n\n  héllo<|im_end|>\n<|im_start|>assistant\n"
    model = AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32)
    _assert_close(model, *_logits_of_llama_cpp(path, tokenizer, text + TEXTS[0] * 2))
    if kind == "phi3 longrope":  # the long factors are for more than the 256 positions that it was trained with
        _assert_close(model, *_logits_of_llama_cpp(path, tokenizer, text * 6, num_positions=512))


@pytest.mark.parametrize(("name", "class_name", "left_out"), [
    ("qwen3_5", "AutoModelForImageTextToText", 48), ("gemma3", "AutoModelForImageTextToText", 39),
    ("phi4_mini", "AutoModelForCausalLM", 0), ("olmo3", "AutoModelForCausalLM", 0)])
def test_a_checkpoint_as_published_is_written_without_its_tower(name, class_name, left_out, tmp_path, capsys):
    import transformers

    folder = write(name, tmp_path / "model")
    path = write_gguf(folder, tmp_path / "m.gguf", "f32")
    err = capsys.readouterr().err
    assert (f"note: {left_out} weights that read images or guess several tokens ahead" in err) == bool(left_out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = getattr(transformers, class_name).from_pretrained(folder, dtype=torch.float32)
    _assert_close(model, *_logits_of_llama_cpp(path, tokenizer, "Who lived in a wood? It's 42 and 007!\n\n  héllo"))


# Of tokenizer.json as published: Llama 3 and SmolLM3; OLMo 2, 3 and Phi-4; Qwen2 and 3; Qwen3.5; Phi-4-mini.
LLAMA_3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
           r"\s+(?!\S)|\s+")
GPT_4O = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
          r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
          r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


@pytest.mark.parametrize(("pattern", "joins_all", "name"), [
    (LLAMA_3, False, "llama-bpe"), (LLAMA_3, True, "dbrx"), ("qwen2", True, "qwen2"), ("qwen3_5", True, "qwen35"),
    (GPT_4O, True, "gpt-4o")])
def test_llama_cpp_splits_text_as_the_published_tokenizer(pattern, joins_all, name, folders, tmp_path):
    import gguf
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer

    if "|" not in pattern:  # transformers' own copy
        pattern = __import__(f"transformers.models.{pattern}.tokenization_{pattern}", fromlist="x").PRETOKENIZE_REGEX
    texts = ["It's 12345 o'clock, HTTPServer's\n\n  x = {'a': 10}/\n\tNOW!? ", "hello WORLD 2024 I'M in"]
    backend = Tokenizer(models.BPE(ignore_merges=not joins_all))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # merges across splits
    special = ["<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.train_from_iterator([t for t in texts for _ in range(4)], trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=special,
        show_progress=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False,
                                                                                   use_regex=False)])
    folder = shutil.copytree(folders["llama"], tmp_path / "model")
    backend.save(str(folder / "tokenizer.json"))
    path = write_gguf(folder, tmp_path / "m.gguf", "f32")
    assert gguf.GGUFReader(path).fields["tokenizer.ggml.pre"].contents() == name
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in [*texts, "It's  HTTPServer's\n\n12345/\n"]:
        assert theirs.tokenize(text.encode(), add_bos=False) == tokenizer(text).input_ids


def _pieces(folder, prepends: bool, merges: list) -> None:
    """A tokenizer of pieces with byte fallback in `folder`: letters, bytes and what the merges make."""
    made = list(dict.fromkeys("".join(merge) for merge in merges))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "▁", *"abcd", *made]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    added = [{"id": i, "content": tokens[i], "special": True, "normalized": False, "single_word": False,
              "lstrip": False, "rstrip": False} for i in range(3)]
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": None,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}] * prepends + [space]},
        "pre_tokenizer": None, "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                  "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>",
        "clean_up_tokenization_spaces": False}))


@pytest.mark.parametrize("prepends", [True, False])
def test_pieces_are_joined_in_the_order_of_the_merges(prepends, folders, tmp_path):
    """With one score for all, llama.cpp would join from the left: ab first, and never bc."""
    import gguf
    from transformers import AutoTokenizer

    folder = shutil.copytree(folders["llama"], tmp_path / "model")
    _pieces(folder, prepends, [["b", "c"], ["a", "b"], ["bc", "d"], ["▁", "a"]])
    path = write_gguf(folder, tmp_path / "m.gguf", "f32")
    fields = gguf.GGUFReader(path).fields
    assert fields["tokenizer.ggml.scores"].contents()[264:268] == [0.0, -1.0, -2.0, -3.0]
    assert fields["tokenizer.ggml.scores"].contents()[260] == -1e9
    assert fields["tokenizer.ggml.add_space_prefix"].contents() is prepends
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert kinds[:4] == [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, gguf.TokenType.BYTE]
    assert AutoTokenizer.from_pretrained(folder)("abcd").input_ids == ([267] if prepends else [260]) + [266]
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in ("abcd", "ab cab é", "dab bcd"):
        assert theirs.tokenize(text.encode(), add_bos=False) == AutoTokenizer.from_pretrained(folder)(text).input_ids


@pytest.mark.parametrize(("kind", "changes", "message"), [
    ("gemma3_text", {"query_pre_attn_scalar": 16}, "query_pre_attn_scalar is 16 and not 32"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is set"),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, "no_rope_layers is not every fourth layer"),
    ("qwen3_5_text", {"linear_value_head_dim": 32}, "linear_value_head_dim is not linear_key_head_dim"),
    ("qwen3_5_text", {"num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "full_attention"]},
     "full attention is not in every nth layer"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is gelu and not silu"),
    ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation is silu and not gelu_pytorch_tanh"),
    ("gemma3_text", {"rope_parameters": {"sliding_attention": YARN, "full_attention": {"rope_type": "default"}}},
     "sliding_attention has rope_type yarn"),
    ("olmo3", {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                                   "full_attention": YARN}},
     "sliding_attention has rope_theta 10000.0, and not 500000"),
    ("llama", {"rope_parameters": YARN | {"beta_fast": 16}}, "rope_parameters.beta_fast is 16"),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
     "partial_rotary_factor is 0.5 and not 1"),
    ("qwen3", {"attention_bias": True}, "attention_bias is set")])
def test_settings_that_llama_cpp_computes_otherwise_are_refused(kind, changes, message, folders, tmp_path):
    folder = shutil.copytree(folders[kind], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=message):
        check_convertible(folder, "f16")


def test_one_tensor_at_a_time_is_in_memory_and_none_in_a_temporary_file(tmp_path, monkeypatch):
    import gguf

    living, most = [], []
    real = gguf.quants.quantize

    def watched(value, kind):
        done = real(value, kind)
        living.append(weakref.ref(done))
        most.append(sum(found() is not None for found in living))
        return done

    def refused(*_given, **_named):
        raise AssertionError("a temporary file")

    monkeypatch.setattr(gguf.quants, "quantize", watched)
    monkeypatch.setattr(gguf.gguf_writer.tempfile, "SpooledTemporaryFile", refused)
    write_gguf(save_tiny(tmp_path / "model", num_hidden_layers=4), tmp_path / "one.gguf", "f16")
    assert len(most) > 30
    assert max(most) == 1
