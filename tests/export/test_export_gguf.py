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
from tests.factories.tiny import save_tiny, tiny_config

KINDS = {"llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {"head_dim": 16},
         "llama with tied embeddings": {"tie_word_embeddings": True},
         "llama 3 rotary": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
                                                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                                "original_max_position_embeddings": 64}}}
# llama.cpp wants head sizes that its kernels know
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, changes in KINDS.items():
        folder = tmp_path_factory.mktemp("gguf") / name.replace(" ", "_")
        made[name] = save_tiny(folder, kind=name.split()[0], **(SHAPE | changes))
    return made


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
    with pytest.raises(UserError, match="a gpt2 model; GGUF export knows llama"):
        check_convertible(save_tiny(tmp_path / "a", kind="gpt2"), "f16")
    with pytest.raises(UserError, match="--gguf q4_0: choose f32"):
        check_convertible(tmp_path / "a", "q4_0")
    folder = save_tiny(tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    (tmp_path / "b" / "config.json").write_text(json.dumps(
        config | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}))
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


@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_computes_what_transformers_does(folders, kind, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = write_gguf(folders[kind], tmp_path / "m.gguf", "f32")
    theirs = llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, logits_all=True, verbose=False)
    tokenizer = AutoTokenizer.from_pretrained(folders[kind])
    text = "<|im_start|>user\nWho lived in a wood? It's 42 and 007!\n\n  héllo<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text).input_ids
    assert theirs.tokenize(text.encode(), add_bos=False, special=True) == ids
    theirs.eval(ids)
    model = AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32)
    with torch.no_grad():
        ours = model(torch.tensor([ids])).logits[0]
    found = torch.from_numpy(np.array(theirs.scores[: len(ids)]))
    assert float((ours - found).abs().max() / ours.abs().max()) < 5e-3  # llama.cpp rounds products' inputs
    assert torch.equal(ours.argmax(-1), found.argmax(-1))


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
