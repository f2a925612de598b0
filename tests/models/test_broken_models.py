"""A model folder may be anybody's: what is wrong with it is one line that names file and key, and nothing outside of it
is read."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data import chat
from hybrid_rlhf.inference.conversation import check_can_chat
from hybrid_rlhf.models import shapes
from hybrid_rlhf.models.load import ModelConfig, load_causal_lm
from hybrid_rlhf.models.lora import LoraConfig, add_lora, load_adapter, save_adapter
from hybrid_rlhf.models.tokenizer import load_tokenizer
from hybrid_rlhf.models.weights import fingerprint, read_tensor
from tests.factories.tiny import save_tiny, tiny_causal_lm, tiny_tokenizer

CONFIG, TOKENIZER, WEIGHTS, INDEX = "config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"


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
    ({"num_attention_heads": 3}, "num_attention_heads 3 does not divide by num_key_value_heads 2"),
    ({"num_attention_heads": 6}, "hidden size (32) is not a multiple of the number of attention heads (6)"),
    ({"hidden_size": "32"}, "hidden_size is '32'"), ({"num_hidden_layers": 10**8}, "num_hidden_layers is 100000000"),
    ({"vocab_size": 10**12}, "describes a model of"), ({"pad_token_id": 300}, "Padding_idx must be within"),
    ({"dtype": "float99"}, "dtype is 'float99'"), ({"hidden_act": "nope"}, "'nope'"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"), ({"model_type": "no_such"}, "`no_such`"),
    ({"transformers_weights": "../other/model.safetensors"}, "transformers_weights"),
    (lambda found: found.pop("model_type"), "model_type"),
], ids=lambda value: value.__name__ if callable(value) else str(value))
def test_a_configuration_that_describes_no_model_is_one_line_with_file_and_key(folder, change, key):
    edit(folder / CONFIG, change)
    start = time.process_time()
    text = said(folder)
    assert f"PLACE/{CONFIG}" in text and key in text
    assert time.process_time() - start < 10
    if "describes a model of" not in key:
        assert key in said(folder, plan)


@pytest.mark.parametrize("content", ["[]", "{"])
@pytest.mark.parametrize(("name", "read"), [(CONFIG, load), (CONFIG, plan), (CONFIG, lambda f: check_can_chat(str(f))),
                                            (INDEX, load), (TOKENIZER, lambda f: load_tokenizer(str(f))),
                                            ("tokenizer_config.json", lambda f: load_tokenizer(str(f)))],
                         ids=["config", "plan", "chat", "index", "tokenizer", "settings"])
def test_a_file_that_is_no_json_object_is_named(folder, name, read, content):
    (folder / WEIGHTS).rename(folder / ("a.safetensors" if name == INDEX else WEIGHTS))  # an index is of several files
    (folder / name).write_bytes(content.encode(errors="surrogateescape"))
    assert f"PLACE/{name} " in said(folder, read)


@pytest.mark.parametrize(("change", "words"), [
    (lambda t: t["model"]["vocab"].update({f"zz{i}": 300 + i for i in range(50)}),
     "ids up to 349, and vocab_size in config.json is 300"),
    (lambda t: t["model"].update(merges=[["q", "no such"]]), "Token `no such` out of vocabulary"),
    (lambda t: t.pop("model"), "Model missing")], ids=range(3))
def test_a_tokenizer_that_is_none_or_is_another_model_s_is_one_line(folder, change, words):
    edit(folder / TOKENIZER, change)
    assert words in said(folder, lambda f: load_tokenizer(str(f)))


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
    (lambda raw: (2**60).to_bytes(8, "little") + raw[8:], "damaged")], ids=range(3))
def test_weights_that_are_not_whole_are_one_line(folder, change, words):
    (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))
    assert words in said(folder)
    assert f"PLACE/{WEIGHTS}" in said(folder, fingerprint)
    assert f"PLACE/{WEIGHTS}" in said(folder, lambda f: read_tensor(f, "score.weight"))


@pytest.mark.parametrize("name", ["../other/model.safetensors", "x.bin", "none.safetensors"])
def test_an_index_names_weight_files_of_its_own_folder_only(folder, name):
    shutil.copytree(folder, folder.parent / "other")
    (folder / WEIGHTS).rename(folder / "x.bin")
    (folder / "a.safetensors").touch()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert INDEX in said(folder)


@pytest.mark.parametrize("name", [CONFIG, TOKENIZER, WEIGHTS])
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


def test_an_adapter_beside_a_model_is_refused_with_what_to_remove(folder):
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/somewhere/else"}))
    shutil.copy(folder / WEIGHTS, folder / "adapter_model.safetensors")
    assert "(adapter_config.json, adapter_model.safetensors) beside its config.json; remove these" in said(folder)
    (folder / "adapter_model.safetensors").unlink()
    (folder / WEIGHTS).rename(folder / "other.safetensors")
    assert "(adapter_config.json) beside its config.json; remove it" in said(folder)


@pytest.mark.parametrize(("name", "change", "words"), [
    ("adapter_config.json", "[]", "adapter_config.json holds no JSON object"),
    ("adapter_config.json", {"peft_type": "X"}, "adapter"),
    ("adapter_config.json", {"target_modules": ["none"]}, "does not fit"),
    ("adapter_model.safetensors", "", "is damaged")], ids=range(4))
def test_an_adapter_that_is_none_is_one_line(tmp_path, name, change, words):
    model = tiny_causal_lm()
    add_lora(model, LoraConfig(r=4))
    save_adapter(model, tmp_path / "adapter")
    edit(tmp_path / "adapter" / name, change) if isinstance(change, dict) else (
        tmp_path / "adapter" / name).write_text(change)
    assert words in said(tmp_path / "adapter", lambda f: load_adapter(tiny_causal_lm(), f, "default"))


def test_an_adapter_of_another_model_is_refused_in_one_line(tmp_path):
    model = tiny_causal_lm()
    add_lora(model, LoraConfig(r=4))
    save_adapter(model, tmp_path / "adapter")
    for folder, other in (("adapter", dict(hidden_size=64)), ("adapter", dict(num_hidden_layers=1)),
                          ("adapter", dict(kind="gpt2")), ("nothing", {})):
        assert "PLACE" in said(tmp_path / folder, lambda f, other=other: load_adapter(tiny_causal_lm(**other), f, "x"))
