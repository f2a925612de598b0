"""A model folder may be anybody's: what is wrong with it is one line that names file and key, and nothing outside of it
is read."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data import chat
from hybrid_rlhf.inference.conversation import check_can_chat
from hybrid_rlhf.models import shapes
from hybrid_rlhf.models.load import ModelConfig, has_score, load_causal_lm
from hybrid_rlhf.models.lora import LoraConfig, add_lora, load_adapter, save_adapter
from hybrid_rlhf.models.tokenizer import load_tokenizer
from hybrid_rlhf.models.weights import fingerprint, read_tensor
from tests.factories.releases import transformers_before
from tests.factories.tiny import save_tiny, tiny_causal_lm, tiny_tokenizer

CONFIG, TOKENIZER, WEIGHTS, INDEX = "config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"
DEEP = '{"a": ' * 10**5 + "1" + "}" * 10**5  # Python 3.13 reads 5,000


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return Path(save_tiny(tmp_path_factory.mktemp("models") / "good"))


@pytest.fixture
def folder(good, tmp_path) -> Path:
    return shutil.copytree(good, tmp_path / "model")


def edit(file: Path, change: Callable[[dict], object] | dict) -> None:
    found = json.loads(file.read_text())
    found.update(change) if isinstance(change, dict) else change(found)
    file.write_text(json.dumps(found))


def load(folder: Path) -> None:
    load_causal_lm(ModelConfig(str(folder)))(torch.tensor([[5, 6, 7]]))


def plan(folder: Path) -> None:
    shapes.count_parameters(shapes.read_config(ModelConfig(str(folder))))


def said(folder: Path, read: Callable = load) -> str:
    """What a read says that is refused, with the folder's name left out."""
    with pytest.raises(UserError) as caught:
        read(folder)
    text = str(caught.value)
    assert "\n" not in text and len(text.replace(str(folder), "")) < 500
    return text.replace(str(folder), "PLACE")


@pytest.mark.parametrize(("change", "key"), [
    ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
    ({"num_attention_heads": 3}, "num_attention_heads 3 does not divide by num_key_value_heads 2"),
    ({"num_attention_heads": 6}, "hidden size (32) is not a multiple of the number of attention heads (6)"),
    ({"hidden_size": 33}, "hidden size (33)"), ({"hidden_size": -32}, "hidden_size is -32"),
    ({"hidden_size": None}, "'hidden_size' expected int"), ({"hidden_size": 32.0}, "hidden_size is 32.0"),
    ({"hidden_size": 32 * 10**9}, "describes a model of"),
    ({"num_hidden_layers": 10**8}, "num_hidden_layers is 100000000"),
    ({"num_hidden_layers": -1}, "num_hidden_layers is -1"), ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    ({"vocab_size": 0}, "vocab_size is 0"), ({"vocab_size": 10**12}, "describes a model of"),
    ({"vocab_size": "300"}, "vocab_size is '300'"), ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0"), ({"head_dim": 0}, "head_dim is 0"),
    pytest.param({"head_dim": 7}, "`head_dim`=7", marks=pytest.mark.skipif(
        transformers_before("5.18"), reason="refused for its weights' shapes")),
    ({"intermediate_size": 10**12}, "describes a model of"),
    ({"max_position_embeddings": "x"}, "max_position_embeddings is 'x'"),
    ({"pad_token_id": 300}, "Padding_idx must be within num_embeddings"),
    ({"pad_token_id": "0"}, "pad_token_id is '0'"), ({"eos_token_id": {}}, "eos_token_id is {}"),
    ({"bos_token_id": "x"}, "bos_token_id is 'x'"), ({"dtype": "float99"}, "dtype is 'float99'"),
    ({"dtype": 7}, "dtype is 7"), ({"torch_dtype": "os"}, "torch_dtype is 'os'"),
    ({"hidden_act": 3}, "hidden_act is 3"),
    ({"hidden_act": "nope"}, "'nope'"), ({"rope_parameters": "x"}, "rope_parameters is 'x'"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"), ({"rope_parameters": {"rope_theta": "x"}}, "TypeError"),
    ({"architectures": 3}, "architectures is 3"), ({"architectures": [3]}, "architectures is [3]"),
    ({"model_type": []}, "model_type is []"), ({"model_type": "no_such"}, "`no_such`"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps"),
    ({"quantization_config": "x"}, "quantization_config is 'x'"), ({"layer_types": 3}, "layer_types is 3"),
    ({"id2label": "x"}, "id2label is 'x'"), ({"num_labels": 10**8}, "num_labels is 100000000"),
    ({"text_config": 3}, "text_config is 3"), ({"sliding_window": "x"}, "sliding_window is 'x'"),
    ({"auto_map": 3}, "auto_map is 3"),
    ({"transformers_weights": "../other/model.safetensors"}, "transformers_weights"),
    (lambda found: found.pop("model_type"), "model_type"),
    (lambda found: found.pop("hidden_size"), "describes a model of"),
], ids=lambda value: value.__name__ if callable(value) else str(value))
def test_a_configuration_that_describes_no_model_is_one_line_with_file_and_key(folder, change, key):
    edit(folder / CONFIG, change)
    start = time.monotonic()
    text = said(folder)
    assert f"PLACE/{CONFIG}" in text and key in text
    assert time.monotonic() - start < 10
    if "describes a model of" not in key:
        assert key in said(folder, plan)


@pytest.mark.parametrize("content", ["", "[]", '"a"', "null", "{", DEEP, "{}\0", '{"a": "\udce9"}',
                                     '{"a": ' + "9" * 5000 + "}"], ids=range(9))
@pytest.mark.parametrize(("name", "read"), [(CONFIG, load), (CONFIG, plan), (CONFIG, lambda f: has_score(str(f))),
                                            (CONFIG, lambda f: check_can_chat(str(f))), (INDEX, load),
                                            (TOKENIZER, lambda f: load_tokenizer(str(f))),
                                            ("tokenizer_config.json", lambda f: load_tokenizer(str(f))),
                                            ("special_tokens_map.json", lambda f: load_tokenizer(str(f)))],
                         ids=["config", "plan", "has_score", "chat", "index", "tokenizer", "settings", "specials"])
def test_a_file_that_is_no_json_object_is_named(folder, name, read, content):
    (folder / WEIGHTS).rename(folder / ("a.safetensors" if name == INDEX else WEIGHTS))  # an index is of several files
    (folder / name).write_bytes(content.encode(errors="surrogateescape"))
    assert f"PLACE/{name} " in said(folder, read)


@pytest.mark.parametrize(("change", "words"), [
    (lambda t: t["model"]["vocab"].update(zz=-1), "PLACE/tokenizer.json: Exception: invalid value"),
    (lambda t: t["model"]["vocab"].update(zz=10**6), "ids up to 1000000, and vocab_size in config.json is 300"),
    (lambda t: t["model"]["vocab"].update({f"zz{i}": 300 + i for i in range(50)}), "ids up to 349"),
    (lambda t: t["model"].update(merges=[["q", "no such"]]), "Token `no such` out of vocabulary"),
    (lambda t: t["model"].update(type="Nope"), "PLACE/tokenizer.json"), (lambda t: t.pop("model"), "Model missing"),
    (lambda t: t.update(added_tokens=3), "PLACE/tokenizer.json"), (lambda t: t.update(version="9.0"), "version"),
    (lambda t: t.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated",
                                       "invert": False}), "parenthesis"),
    (lambda t: t.update(post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": {
        "id": "<nope>", "type_id": 0}}], "pair": [], "special_tokens": {}}), "PLACE/tokenizer.json"),
], ids=range(10))
def test_a_tokenizer_that_is_none_or_is_another_model_s_is_one_line(folder, change, words):
    edit(folder / TOKENIZER, change)
    assert words in said(folder, lambda f: load_tokenizer(str(f)))


@pytest.mark.parametrize("change", [
    {"chat_template": 3}, {"chat_template": {"a": 1}}, {"chat_template": [1]}, {"eos_token": 3}, {"pad_token": {}},
    {"model_max_length": "x"}, {"added_tokens_decoder": 3}, {"extra_special_tokens": 3}, {"auto_map": 3},
    {"tokenizer_class": 3}, {"fast_tokenizer_files": ["../other/tokenizer.0.1.json"]}, {"init_inputs": ["/etc/passwd"]},
], ids=lambda value: value.__name__ if callable(value) else str(value))
def test_settings_of_a_tokenizer_that_are_none_are_one_line(folder, change):
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", change)
    assert "PLACE/" in said(folder, lambda f: load_tokenizer(str(f)))


def test_a_tokenizer_with_tokens_that_the_model_has_no_row_for_cannot_chat(folder):
    from hybrid_rlhf.engine import SamplingConfig
    from hybrid_rlhf.inference.conversation import open_conversation

    def chat_with(template: str, is_special: bool) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        tokenizer.add_tokens(["<|beyond|>"], special_tokens=is_special)
        tokenizer.save_pretrained(folder)
        open_conversation(str(folder), SamplingConfig(max_new_tokens=4))

    words = "1 token (<|beyond|>) beyond the 300 rows"
    assert words in said(folder, lambda _: chat_with(chat.CHATML, is_special=False))
    assert words in said(folder, lambda _: chat_with("<|beyond|>" + chat.CHATML, is_special=True))
    edit(folder / "generation_config.json", {"eos_token_id": [3, 300]})
    assert words in said(folder, lambda _: chat_with(chat.CHATML, is_special=True))
    edit(folder / "generation_config.json", {"eos_token_id": 3})
    chat_with(chat.CHATML, is_special=True)  # as Gemma 3's place of an image, of which the text model knows nothing


@pytest.mark.parametrize(("change", "words"), [
    (lambda raw: raw[: len(raw) // 2], "bytes of its end are missing"), (lambda raw: raw[:-1], "1 bytes of its end"),
    (lambda raw: (2**60).to_bytes(8, "little") + raw[8:], "damaged"), (lambda raw: raw + b"x", "SafetensorError")],
    ids=range(4))
def test_weights_that_are_not_whole_are_one_line(folder, change, words):
    (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))
    assert words in said(folder)
    if words != "SafetensorError":
        assert f"PLACE/{WEIGHTS}" in said(folder, fingerprint)
        assert f"PLACE/{WEIGHTS}" in said(folder, lambda f: read_tensor(f, "score.weight"))


# --- what lies outside -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "sub/model.safetensors", "x.bin", 3,
                                  "..", "none.safetensors"])
def test_an_index_names_weight_files_of_its_own_folder_only(folder, name):
    shutil.copytree(folder, folder.parent / "other")
    (folder / WEIGHTS).rename(folder / "x.bin")
    (folder / "a.safetensors").touch()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert INDEX in said(folder)


@pytest.mark.parametrize("name", [CONFIG, TOKENIZER, WEIGHTS, "tokenizer_config.json", "chat_template.jinja",
                                  "additional_chat_templates", "adapter_config.json", "vocab.txt"])
@pytest.mark.parametrize("kind", ["out", "nowhere"])
def test_a_link_that_leads_out_of_a_model_folder_is_refused(folder, name, kind):
    outside = folder.parent / "outside"
    if (folder / name).exists():
        (folder / name).rename(outside)
    elif kind != "nowhere":
        outside.write_text("{}")
    (folder / name).symlink_to(outside if kind == "out" else folder.parent / "none")
    for read in (load, plan, lambda f: load_tokenizer(str(f))):
        assert f"PLACE/{name} is " in said(folder, read)
    assert name in said(folder, lambda f: check_can_chat(str(f)))
    if kind == "out":
        assert f"to {outside}; copy the file itself there, or give the folder" in said(folder)


def test_the_links_of_the_hub_s_cache_and_those_within_a_folder_are_read(good, tmp_path):
    home = tmp_path / "models--a--b"
    folder = home / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    (home / "blobs").mkdir()
    for i, path in enumerate(sorted(good.iterdir())):
        shutil.copy(path, home / "blobs" / f"{i:040x}")
        (folder / path.name).symlink_to(f"../../blobs/{i:040x}")
    load(folder)
    assert len(load_tokenizer(str(folder))) == 300
    (tmp_path / "there").symlink_to(folder)
    load(tmp_path / "there")
    plain = shutil.copytree(good, tmp_path / "plain")
    (plain / WEIGHTS).rename(plain / "weights.0")
    (plain / WEIGHTS).symlink_to("weights.0")
    load(plain)


def test_links_into_a_hub_s_cache_are_read_from_anywhere_and_texts_that_nothing_reads_may_lead_anywhere(
        good, tmp_path, monkeypatch):
    deep = tmp_path / "elsewhere" / "snapshots" / "0123abc" / "text"  # a folder within a snapshot
    deep.mkdir(parents=True)
    caches = [tmp_path / "elsewhere" / "blobs", tmp_path / "models--a--b" / "blobs", tmp_path / "cache" / "dedup"]
    for cache in caches:
        shutil.copytree(good, cache)
    (tmp_path / "linked").symlink_to(tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "linked"))
    for folder, cache in zip([deep, tmp_path / "one", tmp_path / "two"], caches, strict=True):
        folder.mkdir(exist_ok=True)
        for path in cache.iterdir():
            (folder / path.name).symlink_to(path)
        for name in ("README.md", "LICENSE.txt", "modeling.py"):
            (folder / name).symlink_to(tmp_path / "none")
        load(folder)


def test_settings_of_an_adapter_beside_a_whole_model_are_passed_over(folder):
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/somewhere/else"}))
    if transformers_before("5.23"):  # which looks beside the model whatever it is told
        assert "Can't find 'adapter_config.json'" in said(folder)
    else:
        load(folder)


def test_an_adapter_beside_a_model_is_refused_with_what_to_remove(folder):
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/somewhere/else"}))
    shutil.copy(folder / WEIGHTS, folder / "adapter_model.safetensors")
    assert "(adapter_config.json, adapter_model.safetensors) beside its config.json; remove these" in said(folder)
    (folder / "adapter_model.safetensors").unlink()
    (folder / WEIGHTS).rename(folder / "other.safetensors")
    assert "(adapter_config.json) beside its config.json; remove it" in said(folder)


@pytest.mark.parametrize("name", ["flax_model.msgpack.index.json", "tf_model.h5.index.json",
                                  "pytorch_model.bin.index.json"])
def test_an_index_of_weights_that_are_not_loaded_is_not_checked(folder, name):
    (folder / name).write_text(json.dumps({"weight_map": {"a": "absent"}}))
    load(folder)


# --- adapters --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("name", "change", "words"), [
    ("adapter_config.json", "[]", "adapter_config.json holds no JSON object"),
    ("adapter_config.json", "{", "not valid JSON"), ("adapter_config.json", {"r": 10**9}, "r is 1000000000"),
    ("adapter_config.json", {"r": "4"}, "adapter_config.json"), ("adapter_config.json", {"peft_type": "X"}, "adapter"),
    ("adapter_config.json", {"target_modules": ["none"]}, "does not fit"),
    ("adapter_config.json", {"lora_alpha": "x"}, "does not fit"), ("adapter_model.safetensors", "", "is damaged")],
    ids=range(8))
def test_an_adapter_that_is_none_is_one_line(tmp_path, name, change, words):
    model = tiny_causal_lm()
    add_lora(model, LoraConfig(r=4))
    save_adapter(model, tmp_path / "adapter")
    edit(tmp_path / "adapter" / name, change) if isinstance(change, dict) else (
        tmp_path / "adapter" / name).write_text(change)
    assert words in said(tmp_path / "adapter", lambda f: load_adapter(tiny_causal_lm(), f, "default"))


# --- anything --------------------------------------------------------------------------------------------------------

VALUES = st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text(max_size=3) | st.sampled_from(
    [10**12, [], {}, [1], {"a": 1}, "llama", "float16"])


@settings(max_examples=40, deadline=20_000, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_folder_whose_settings_hold_anything_is_read_or_refused(good, tmp_path_factory, data):
    folder = shutil.copytree(good, tmp_path_factory.mktemp("any") / "model")
    for name in (CONFIG, "tokenizer_config.json", "generation_config.json"):
        known = sorted(json.loads((folder / name).read_text()))
        changes = data.draw(st.dictionaries(st.sampled_from(known), VALUES, max_size=2))
        edit(folder / name, changes)
    for read in (load, plan, lambda f: load_tokenizer(str(f))):
        with suppress(UserError):
            read(folder)
    shutil.rmtree(folder.parent)
