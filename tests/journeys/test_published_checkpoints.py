"""Checkpoints exactly as published, tiny: a sample is trained two steps with adapters and saved; the commands of
`benchmarks/checkpoints.py` on more of them are slow. Plain transformers and peft judge (`checkpoints.differences`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import checkpoints as published
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hybrid_rlhf.data.collate import collate_sft
from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.export.folder import export
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig
from hybrid_rlhf.models.tokenizer import load_tokenizer
from hybrid_rlhf.roles import Actor
from hybrid_rlhf.trainers.sft import SFTTrainer
from hybrid_rlhf.training import builders
from tests.factories import checkpoints
from tests.factories.checkpoints import CHECKPOINTS
from tests.factories.trainers import SFT_ROWS, trained

SAMPLE = ["qwen3_5", "gemma3", "gemma4", "llama4", "mistral_small_3_1", "gpt_oss", "llama3_2_bnb_4bit"]
DEQUANTISED = ["ministral3_fp8", "gpt_oss_mxfp4", "deepseek_v3"]  # saved as plain ones: not as they were
REFUSED = {"mistral_small_3_2": "tekken.json", "qwen2_5_awq": "awq", "qwen2_5_gptq": "gptq"}
# experts, images, fused projections and layers with a state: what is not among the others; all by `make checkpoints`
SLOW = ["qwen3_5_moe", "gemma4_unified", "qwen3_vl", "glm4_6", "phi4_mini", "granite4_h", "lfm2", "nemotron_h",
        "falcon_h1"]


def write(name: str, folder: Path, monkeypatch) -> None:
    if (lacking := checkpoints.missing(name)) is not None:
        pytest.skip(lacking)
    pytest.importorskip("trl", reason="its chat templates")
    monkeypatch.chdir(folder)
    checkpoints.write(name, "base")


@pytest.mark.parametrize("name", SAMPLE)
def test_a_published_checkpoint_is_decoded_trained_and_saved_as_it_was(name, tmp_path, monkeypatch):
    write(name, tmp_path, monkeypatch)
    trained_and_saved(name)
    assert published.differences(CHECKPOINTS[name].architecture, "sft/model") == ""


@pytest.mark.parametrize("name", DEQUANTISED)
def test_fp8_and_mxfp4_are_trained_and_saved_as_plain_models_of_their_class(name, tmp_path, monkeypatch):
    write(name, tmp_path, monkeypatch)
    trained_and_saved(name)
    made = getattr(transformers, CHECKPOINTS[name].architecture)
    model, loading = made.from_pretrained("sft/model", output_loading_info=True)
    assert not any(loading.values())
    assert "quantization_config" not in json.loads(Path("sft/model/config.json").read_text())
    assert {p.dtype for p in model.parameters()} <= {torch.bfloat16, torch.float32}


def trained_and_saved(name: str) -> None:
    """Two steps of SFT and a rollout of the model in base; sft/model, sft/adapter."""
    os.mkdir("sft")
    config = ModelConfig("base", lora=LoraConfig(r=4), load_in_4bit=CHECKPOINTS[name].loads_in_4bit)
    tokenizer = load_tokenizer("base")
    builders.check_model(config, builders.ZeroConfig())
    model = builders.open_policy(config, tokenizer, 0, dropout=False)
    engine = builders.policy_engine(model, tokenizer)
    policy = Actor(trained(engine, 1e-2), tokenizer, 8192)
    for _ in range(2):
        SFTTrainer(policy).step(collate_sft(SFT_ROWS, tokenizer.pad_token_id))
    with engine.inference():
        engine.generate([[5, 6, 7], [8, 9]], SamplingConfig(2, temperature=0))
    assert engine.describe()["path"] == "native"
    export(model, tokenizer, "sft/model", engine.eos_ids)


@pytest.mark.parametrize("name", REFUSED)
def test_a_checkpoint_that_cannot_be_trained_is_refused_in_one_line(name, tmp_path, monkeypatch, capsys):
    from hybrid_rlhf.cli import main

    write(name, tmp_path, monkeypatch)
    published.write_data()
    assert main(["sft", "--model", "base", "--data.sources", "sft.jsonl", "--output_dir", "sft"]) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 1 and REFUSED[name] in said and not Path("sft/model").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_others_go_through_sft_and_grpo_by_the_benchmark(tmp_path):
    pytest.importorskip("trl", reason="its chat templates")
    command = [sys.executable, published.__file__, "--cases", *SLOW, "--stages", "sft", "grpo", "--json",
               f"{tmp_path}/rows.json", "--page", f"{tmp_path}/page.md"]  # in a process without threads: it forks
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    rows = json.loads((tmp_path / "rows.json").read_text())
    wrong = [row for row in rows if (row["sft"], row["grpo"]) != ("ok", "ok") and "transformers" not in row["sft"]]
    assert not wrong and done.returncode == 0 and [row["case"] for row in rows] == SLOW
    assert (tmp_path / "page.md").read_text().count("| ok | ok | not tried | not tried |") >= len(SLOW) - 2


# -- the judge ---------------------------------------------------------------------------------------------------------


def copied(folder: Path) -> None:
    """Base and an adapter of one layer in the current folder, and what SFT would have saved."""
    import peft

    checkpoints.write("qwen3_5", "base")
    model = transformers.Qwen3_5ForConditionalGeneration.from_pretrained("base", dtype=torch.float32)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    wrapped.save_pretrained("sft/adapter")
    merged = wrapped.merge_and_unload().state_dict()
    for path in Path("base").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for file in folder.glob("*.safetensors"):
        save_file({name: merged[name].bfloat16() if "language_model" in name and "q_proj" in name else weight
                   for name, weight in load_file(file).items()}, file, {"format": "pt"})


def changed(file: str, **settings: object) -> None:
    path = Path("saved") / file
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def without(part: str) -> None:
    for file in Path("saved").glob("*.safetensors"):
        save_file({n: w for n, w in load_file(file).items() if not n.startswith(part)}, file, {"format": "pt"})


def moved(name: str) -> None:
    for file in Path("saved").glob("*.safetensors"):
        save_file({n: w + 1 if n == name else w for n, w in load_file(file).items()}, file, {"format": "pt"})


FAULTS = {
    "without preprocessor_config.json": lambda: os.remove("saved/preprocessor_config.json"),
    "loses mtp.fc.weight, mtp.layers.0.input": lambda: without("mtp."),
    "changes model.visual.pos_embed.weight": lambda: moved("model.visual.pos_embed.weight"),
    "logits off by": lambda: moved("model.language_model.layers.1.self_attn.q_proj.weight"),
    "another chat template": lambda: Path("saved/chat_template.jinja").write_text("{{ messages }}"),
    "generation_config.json: eos_token_id [282, 280] -> 282": lambda: changed("generation_config.json",
                                                                              eos_token_id=282),
    "generation_config.json: top_k 20 -> None": lambda: changed("generation_config.json", top_k=None),
    "config.json: architectures ['Qwen3_5ForConditionalGeneration'] -> ['Qwen3_5ForCausalLM']":
        lambda: changed("config.json", architectures=["Qwen3_5ForCausalLM"]),
    "config.json: image_token_id": lambda: changed("config.json", image_token_id=3)}


def test_the_judge_names_each_thing_that_an_export_loses(tmp_path, monkeypatch):
    pytest.importorskip("trl", reason="its chat templates")
    monkeypatch.chdir(tmp_path)
    os.mkdir("right")
    copied(Path("right"))
    for said, break_it in {"": lambda: None, **FAULTS}.items():
        os.makedirs("saved", exist_ok=True)
        for path in Path("right").iterdir():
            (Path("saved") / path.name).write_bytes(path.read_bytes())
        break_it()
        found = published.differences("Qwen3_5ForConditionalGeneration", "saved")
        assert found.startswith(said) if said else not found, (said, found)
