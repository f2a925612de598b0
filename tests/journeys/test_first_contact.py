"""What a new user met: a base that could not chat, cures that did not fit, a tied model counted twice."""

from __future__ import annotations

import json

import pytest

from hybrid_rlhf.cli import main
from hybrid_rlhf.inference.named_models import model_folder
from hybrid_rlhf.models import shapes
from hybrid_rlhf.models.load import ModelConfig
from tests.factories.tiny import save_tiny, tiny_causal_lm

PAIRS = [(f"Name fruit {i}.", f"It is fruit {i}.") for i in range(20)]


@pytest.fixture
def place(tmp_path, monkeypatch):
    save_tiny(tmp_path / "base", template=False, max_position_embeddings=1024)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": q, "response": a}) + "\n" for q, a in PAIRS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sft(*words: str) -> int:
    return main(["--stage", "sft", "--model", "base", "--data.sources", "rows.jsonl", "--train.max_steps", "1",
                 "--train.num_fixed_prompts", "0", "--output_dir", "run", *words])


def test_questions_and_answers_in_plain_text_make_a_base_without_a_template_one_that_can_chat(place, capsys):
    assert sft() == 0
    assert "rendered as user turns" in capsys.readouterr().err
    assert main(["chat", "--model", "run", "--prompt", "Name fruit 3.", "--max_new_tokens", "2"]) == 0


def test_raw_keeps_them_as_they_are_and_adds_no_template(place):
    assert sft("--data.raw", "true") == 0
    assert not (place / "run" / "model" / "chat_template.jinja").exists()


def test_a_model_of_an_earlier_run_in_an_unfinished_run_s_folder_is_told(place, capsys):
    assert sft() == 0
    record = json.loads((place / "run" / "run.json").read_text())
    (place / "run" / "run.json").write_text(json.dumps(record | {"status": "stopped"}))
    capsys.readouterr()
    assert model_folder("run").name == "model"
    assert "the run in run is not finished (stopped); the model there is of a run before it" in capsys.readouterr().err


def test_tied_weights_are_counted_once(tmp_path):
    model = tiny_causal_lm(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    found = shapes.count_parameters(shapes.read_config(ModelConfig(str(tmp_path))))
    assert found == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("words", "said"), [
    (["--stage", "reward", "--model", "base", "--data.sources", "odd.jsonl"],
     "columns: {chosen: good, rejected: bad}}"),
    (["--stage", "sft", "--model", "somebody/some-model", "--data.sources", "rows.jsonl"],
     "the hub is out of reach: give a folder with config.json, or download it first where there is a network "
     "(hf download somebody/some-model)"),
    (["--stage", "sft", "--ppo.kl_coef", "0.1"], "unknown option ppo.kl_coef: --stage sft has no ppo options"),
    (["--stage", "grpo", "--model", "base", "--data.sources", "rows.jsonl", "--reward.functions",
      "builtin:length_penalty"], "builtin:length_penalty needs max_tokens and buffer; give reward.options"),
])
def test_a_mistake_is_one_line_with_what_would_fit(place, monkeypatch, capsys, words, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # for what is imported from here on, and for what was before
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    odd = [{"prompt": question, "good": answer, "bad": "no"} for question, answer in PAIRS]
    (place / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in odd))
    assert main(words) == 2
    assert said in capsys.readouterr().err
