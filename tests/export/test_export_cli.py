"""`hybrid-rlhf export` on runs, models and adapters; Modelfiles against the Jinja template that they stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rlhf import cli
from hybrid_rlhf.commands import export
from hybrid_rlhf.data.chat import CHATML
from hybrid_rlhf.export import ollama
from hybrid_rlhf.models import saving
from hybrid_rlhf.models.lora import LoraConfig, add_lora, lora_layers, save_adapter
from tests.factories.tiny import save_tiny

LLAMA_3 = ("{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
           "<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n ")
MISTRAL = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n\n"
           "{% elif m.role == 'user' %}"
           "[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}")
# SmolLM2-135M-Instruct's own
SMOLLM2 = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
           "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
           "Hugging Face<|im_end|>\n' }}"
           "{% endif %}"
           "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
           "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def jinja(text):
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = ImmutableSandboxedEnvironment().from_string(text)
    return lambda m: template.render(messages=m, add_generation_prompt=True, bos_token="<s>", eos_token="</s>")


def adapter_of(base: str, folder: Path, std: float = 0.3) -> str:
    """A LoRA adapter, whose effect is large unless `std` is small."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    add_lora(model, LoraConfig(r=4))
    torch.manual_seed(1)
    for layer in lora_layers(model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=std)
    save_adapter(model, folder)
    return str(folder)


@pytest.mark.parametrize("template", [CHATML, LLAMA_3, MISTRAL, SMOLLM2])
def test_a_template_of_fixed_strings_is_found(template):
    render = jinja(template)
    turns = ollama.turns_of(render, "<s>")
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "{{ .Role }}"},
            {"role": "assistant", "content": "b"}, {"role": "user", "content": "c\n"}]
    assert turns.render(talk) == render(talk)
    assert turns.render(talk[1:]) == render(talk[1:])


def test_the_text_of_chatml_in_ollamas_language():
    assert ollama.template_text(ollama.turns_of(jinja(CHATML))).startswith(
        '{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n{{ end }}')


def test_a_default_system_message_stands_where_ollama_has_none():
    assert ollama.template_text(ollama.turns_of(jinja(SMOLLM2))) == (
        "{{ if not .System }}<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n{{ end }}{{ range .Messages }}"
        '{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n{{ end }}'
        '{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n{{ end }}'
        '{{ if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n{{ end }}'
        "{{ end }}<|im_start|>assistant\n")


@pytest.mark.parametrize("change", ["m.content | trim", "loop.index ~ m.content", "m.content if loop.first else ''"])
def test_a_template_that_does_more_is_not_written(change):
    assert ollama.turns_of(jinja(LLAMA_3.replace("m.content", change)), "<s>") is None
    assert "cannot be written" in ollama.modelfile("./x.gguf", None, [], {})


@pytest.mark.slow
def test_an_adapter_is_merged_and_what_it_learned_stays(tmp_path, capsys):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = save_tiny(tmp_path / "base")
    adapter = adapter_of(base, tmp_path / "adapter")
    assert cli.main(["export", "--model", adapter, "--output_dir", str(tmp_path / "out"), "--ollama"]) == 0
    said = capsys.readouterr()
    assert "tokens equal" in said.err
    assert said.out.split() == [str(tmp_path / name) for name in ("out", "out/out-f16.gguf", "out/Modelfile")]
    ids = torch.tensor([[5, 9, 40, 7, 60]])
    plain = AutoModelForCausalLM.from_pretrained(base)
    untouched = plain(ids).logits.detach().clone()
    with_adapter = PeftModel.from_pretrained(plain, adapter)(ids).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
    torch.testing.assert_close(merged, with_adapter, rtol=1e-4, atol=1e-5)
    assert float((merged - untouched).detach().abs().max()) > 0.1
    assert 'PARAMETER stop "<|im_end|>"' in (tmp_path / "out/Modelfile").read_text()


@pytest.mark.slow
def test_an_export_that_differs_leaves_nothing(tmp_path, monkeypatch, capsys):

    base = save_tiny(tmp_path / "base")
    real = saving.save

    def damaged(model, weights, folder):
        real(model, {k: replace(w, make=lambda make=w.make: make() * 1.1) if "down_proj" in k else w
                     for k, w in weights.items()}, folder)

    monkeypatch.setattr(saving, "save", damaged)
    assert export.main(["--model", base, "--output_dir", str(tmp_path / "out")]) == 1
    assert "differ by" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base"]


@pytest.mark.parametrize(("std", "written"), [(0.3, torch.bfloat16), (1e-5, torch.float32)])
def test_what_is_written_is_bit_for_bit_the_whole_merge_in_fp32(tmp_path, std, written):
    """The files are read in their own dtype, but nothing is rounded before what was learned has been added."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = save_tiny(tmp_path / "base", dtype=torch.bfloat16)
    adapter = adapter_of(base, tmp_path / "adapter", std)
    assert export.main(["--model", adapter, "--output_dir", str(tmp_path / "out")]) == 0
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = PeftModel.from_pretrained(whole, adapter).merge_and_unload().state_dict()
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == written
        assert torch.equal(found[name], value.to(written)), name


@pytest.mark.parametrize(("flags", "said"), [
    ([], "no model; give --model DIR"),
    (["--model", "{base}"], "give --output_dir DIR"),
    (["--model", "{tmp}/none", "--output_dir", "{tmp}/x"], "is not a folder"),
    (["--model", "{tmp}", "--output_dir", "{tmp}/x"], "holds neither a model"),
    (["--model", "{base}", "--output_dir", "{base}"], "is not empty"),
    (["--model", "{base}", "--output_dir", "{tmp}/x", "--gguf", "f17"], "--gguf f17: choose"),
    (["--model", "{base}", "--output_dir", "{tmp}/x", "--base", "{base}"], "--base is for adapters"),
    (["--model", "{base}", "--outptu_dir", "{tmp}/x"], "unknown argument --outptu_dir (did you mean --output_dir?)"),
])
def test_wrong_input_is_one_line_and_leaves_nothing(tmp_path, capsys, flags, said):
    base = save_tiny(tmp_path / "base")
    before = sorted(tmp_path.rglob("*"))
    given = [f.format(tmp=tmp_path, base=base) for f in flags]
    assert cli.main(["export", *given]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_pushing_uploads_the_folder_privately_and_a_refusal_is_one_line(tmp_path, monkeypatch, capsys):
    import huggingface_hub

    calls = []

    class Hub:
        def create_repo(self, name, **more):
            calls.append((name, more))
            if name == "taken/name":
                raise ValueError("403\n Forbidden")

        def upload_folder(self, **more):
            calls.append(more)
            return "https://huggingface.co/me/mine"

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    base = save_tiny(tmp_path / "base")
    assert export.main(["--model", base, "--output_dir", str(tmp_path / "a"), "--push_to_hub", "me/mine"]) == 0
    assert "https://huggingface.co/me/mine" in capsys.readouterr().out
    assert calls[0] == ("me/mine", {"private": True, "exist_ok": True})
    assert calls[1]["folder_path"] == tmp_path / "a"
    assert cli.main(["export", f"--model={base}", f"--output_dir={tmp_path}/b", "--push_to_hub=taken/name"]) == 2
    assert "403 Forbidden" in capsys.readouterr().err


def test_the_card_says_what_the_run_was(tmp_path):
    from hybrid_rlhf.export.model_card import card_text

    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    text = card_text("mine", {
        "stage": "sft", "command": "train.py --stage sft", "metrics": {"eval/loss": 1.25, "time/step": 3.0},
        "config": {"seed": 3, "model": {"model_name_or_path": str(base), "lora": {"r": 8}},
                   "train": {"learning_rate": 1e-4, "num_train_epochs": None},
                   "roles": {"actor": {"learning_rate": 2e-5}, "critic": {"learning_rate": None}},
                   "data": {"sources": [{"path": "/home/me/secret/rows.jsonl"}]}},
        "facts": {"data": {"train": 10}}, "versions": {"torch": "2.13"}})
    assert text.startswith("---\nlibrary_name: transformers\n")
    for part in ("license: apache-2.0", "rows.jsonl", "learning_rate 0.0001, actor learning_rate 2e-05, LoRA r 8",
                 "| eval/loss | 1.25 |", "`train.py --stage sft`",
                 "torch 2.13", "train 10"):
        assert part in text
    assert "/home/me" not in text and "\nmodel_name: base-mine\n" in text and "\n# base-mine\n" in text
    assert "time/step" not in text


@pytest.mark.parametrize("record", ["", "[]", "{}"])
def test_the_card_of_a_run_after_one_with_a_damaged_record_names_that_one(tmp_path, record):
    from hybrid_rlhf.export.model_card import card_text

    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "run.json").write_text(record)
    run = {"stage": "ppo", "facts": {"base_model": str(tmp_path / "sft")}, "config": {}, "metrics": {}}
    text = card_text("ppo", run)
    assert "stage `ppo`, from `sft`." in text
