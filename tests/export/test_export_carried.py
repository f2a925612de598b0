"""An export takes over what the base's folder holds beside weights, and is tried before a run's first step."""

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.export import folder as export_folder
from hybrid_rlhf.export.folder import ExportDiffers, export, try_export
from hybrid_rlhf.models import load, saving
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from hybrid_rlhf.models.tokenizer import load_tokenizer
from tests.factories.tiny import save_tiny, tiny_tokenizer

KEPT = {"preprocessor_config.json": "{}", "processor_config.json": "{}", "video_preprocessor_config.json": "{}",
        "LICENSE": "as it is", "NOTICE.txt": "so is this", "tokenizer.model": "pieces", "vocab.json": "{}",
        "tekken.json": "{}", "params.json": "{}"}
LEFT = ("optimizer.pt", "training_args.bin", "old-f16.gguf", "modeling_own.py", ".gitattributes", "trainer_state.json",
        "quantize_config.json", "special_tokens_map.json", "consolidated.safetensors.index.json", "rng_state_0.pth",
        "rust_model.ot", "64.tflite", "train.parquet", "rows.jsonl", "events.out.tfevents.1")


@pytest.fixture
def base(tmp_path):
    folder = Path(save_tiny(tmp_path / "base"))
    for name, text in KEPT.items():
        (folder / name).write_text(text)
    for name in LEFT:
        (folder / name).write_text("{}")
    (folder / "README.md").write_text("the base's")
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5/config.json").write_text("{}")
    (tmp_path / "secret.txt").write_text("the user's")
    (folder / "linked.txt").symlink_to(tmp_path / "secret.txt")
    return folder


WRITTEN = {"chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
           "tokenizer_config.json"}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_every_file_of_the_base_that_is_no_weights_and_not_replaced_is_exported(base, tmp_path):
    export(load.load_causal_lm(ModelConfig(str(base))), load_tokenizer(str(base)), tmp_path / "model", [3])
    assert names(tmp_path / "model") == WRITTEN | KEPT.keys()
    assert all((tmp_path / "model" / name).read_text() == text for name, text in KEPT.items())
    ids = load_tokenizer(str(tmp_path / "model"))("a little red fox").input_ids
    assert ids == load_tokenizer(str(base))("a little red fox").input_ids


def test_another_tokenizer_s_model_gets_no_vocabulary_of_the_base_s(base, tmp_path):
    export(load.load_causal_lm(ModelConfig(str(base))), tiny_tokenizer(290), tmp_path / "model", [3])
    assert names(tmp_path / "model") == (WRITTEN | KEPT.keys()) - {
        "chat_template.jinja", "tokenizer.model", "vocab.json", "tekken.json"}


def test_a_processor_s_old_template_is_not_kept_beside_the_one_that_was_written(base, tmp_path):
    (base / "chat_template.jinja").unlink()
    (base / "chat_template.json").write_text('{"chat_template": "old"}')
    tokenizer, model = load_tokenizer(str(base)), load.load_causal_lm(ModelConfig(str(base)))
    export(model, tokenizer, tmp_path / "model", [3])
    assert "chat_template.json" in names(tmp_path / "model")
    tokenizer.chat_template = "new"
    export(model, tokenizer, tmp_path / "model", [3])
    assert "chat_template.json" not in names(tmp_path / "model")
    assert (tmp_path / "model/chat_template.jinja").read_text() == "new"


def test_names_of_code_that_is_not_exported_leave_the_configuration(base, tmp_path):
    config = json.loads((base / "config.json").read_text()) | {"auto_map": {"AutoConfig": "configuration_own.Own"}}
    (base / "config.json").write_text(json.dumps(config))
    model = load.load_causal_lm(ModelConfig(str(base)))
    export(model, load_tokenizer(str(base)), tmp_path / "model", [3])
    assert "auto_map" not in json.loads((tmp_path / "model/config.json").read_text())
    assert model.config.auto_map  # of the live one


def test_a_hub_s_model_is_exported_with_the_files_of_its_snapshot(base, tmp_path, monkeypatch):
    import huggingface_hub

    def download(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert name == "someone/model" and "*/*" in ignore_patterns
        assert "*.json" in allow_patterns and not any(fnmatch("m.safetensors", p) for p in allow_patterns)
        return str(base)

    model = load.load_causal_lm(ModelConfig(str(base)))
    model.config.name_or_path, monkeypatch_tokenizer = "someone/model", load_tokenizer(str(base))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    try_export(model, monkeypatch_tokenizer, [3])
    folder = tmp_path / "beside"
    folder.mkdir()
    export_folder.save_beside(model, monkeypatch_tokenizer, folder)
    assert {"LICENSE", "preprocessor_config.json", "tokenizer.model"} <= names(folder)


@pytest.mark.parametrize("max_bytes", [2 * 10**9, 40_000])
def test_tensors_that_the_class_does_not_read_are_exported_as_they_are(max_bytes, base, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(saving, "MAX_BYTES", max_bytes)
    further = {"mtp.fc.weight": torch.randn(4, 3).bfloat16(), "mtp.norm.weight": torch.arange(3)}
    save_file(further, tmp_path / "more.safetensors")
    model = load.load_causal_lm(ModelConfig(str(base)))
    gone = str(tmp_path / "gone.safetensors")
    model.unread_tensors = dict.fromkeys(further, str(tmp_path / "more.safetensors")) | {"mtp.other": gone}
    export(model, load_tokenizer(str(base)), tmp_path / "model", [3])
    written = {k: v for file in (tmp_path / "model").glob("*.safetensors") for k, v in load_file(file).items()}
    assert written.keys() == load_file(base / "model.safetensors").keys() | further.keys()
    for name, value in further.items():
        assert written[name].dtype == value.dtype and torch.equal(written[name], value)
    assert "the export lacks 1 tensor (mtp.other)" in caplog.text


def test_a_model_that_could_not_be_exported_is_one_line_before_the_first_step(base, monkeypatch):
    model, tokenizer = load.load_causal_lm(ModelConfig(str(base))), load_tokenizer(str(base))
    add_lora(model, LoraConfig(r=4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try_export(model, tokenizer, [3])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    def refuse(*_given: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", refuse)
    with pytest.raises(UserError, match=r"^a trained LlamaForCausalLM could not be exported: NotImplementedError; "):
        try_export(model, tokenizer, [3])


def test_a_run_tries_its_export_before_its_first_step(base, tmp_path, monkeypatch, capsys):
    from hybrid_rlhf.cli import main

    def refuse(*_given: object) -> None:
        raise ValueError("names clash")

    monkeypatch.setattr(saving, "check_names", refuse)
    code = main(["--stage", "grpo", "--model.model_name_or_path", str(base), "--data.sources", "demo/prompts",
                 "--output_dir", str(tmp_path / "out"), "--train.max_steps", "1", "--reward.functions",
                 "[builtin:demo_correct]", "--data.max_prompt_length", "64", "--ppo.sampling.max_new_tokens", "8"])
    assert code == 2
    assert "a trained LlamaForCausalLM could not be exported: names clash;" in capsys.readouterr().err
    assert not (tmp_path / "out/metrics.jsonl").exists()


def test_what_differs_when_it_is_loaded_again_is_kept_under_another_name(base, tmp_path, monkeypatch):
    model, tokenizer = load.load_causal_lm(ModelConfig(str(base))), load_tokenizer(str(base))
    add_lora(model, LoraConfig(r=4))
    export(model, tokenizer, tmp_path / "model", [3])
    shutil.rmtree(tmp_path / "adapter")
    marker = tmp_path / "model/of_the_first"
    marker.write_text("")

    def other(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
        again = type(model).from_pretrained(folder)
        again.lm_head.weight.data *= 2
        return again

    monkeypatch.setattr(export_folder, "reload_like", other)
    with pytest.raises(ExportDiffers, match=r"model: reloaded outputs differ from the live model's by 1 .*; nothing is "
                                            r"lost: what was written is in .*/model_differs, the last checkpoint"):
        export(model, tokenizer, tmp_path / "model", [3])
    assert marker.exists()
    assert names(tmp_path / "model_differs") == names(tmp_path / "model") - {"of_the_first"}
    assert load_file(tmp_path / "model_differs/model.safetensors").keys() == load_file(
        tmp_path / "model/model.safetensors").keys()
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names(tmp_path / "adapter")
    assert not list(tmp_path.glob(".hybrid*"))
