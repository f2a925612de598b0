"""A chat with several models: side by side on one load of their base, judged, taken back, loaded, typed over lines."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.inference.chat import repl
from hybrid_rlhf.inference.chat.session import Session
from hybrid_rlhf.inference.chat_models import open_chat_models
from hybrid_rlhf.models.lora import LoraConfig, add_lora, lora_layers, save_adapter
from tests.factories.chats import conversation
from tests.factories.merged import merged_state_dict
from tests.factories.tiny import save_tiny, tiny_causal_lm, tiny_tokenizer


def typed(monkeypatch, capsys, session: Session, *lines: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    code = repl.talk(session)
    return code, *capsys.readouterr()


def lora_run(folder: Path, base: str, seed: int) -> str:
    """What a LoRA run leaves: model/ (merged), adapter/ and run.json, on the model at `base`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base)
    add_lora(model, LoraConfig(r=4))
    torch.manual_seed(seed)
    for layer in lora_layers(model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.3)
    save_adapter(model, folder / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(base)
    plain.load_state_dict(merged_state_dict(model))
    plain.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / "model")
    (folder / "run.json").write_text("{}")
    return str(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("runs")
    base = save_tiny(folder / "base")
    sft = lora_run(folder / "sft", base, 1)
    return {"base": base, "sft": sft, "ppo": lora_run(folder / "ppo", f"{sft}/model", 2)}


# --- one base --------------------------------------------------------------------------------------------------------

def test_base_sft_and_ppo_are_one_load_and_answer_as_their_own_folders_do(runs):
    from tests.factories.chats import greedy_by_transformers

    chat_models = open_chat_models(runs, SamplingConfig(max_new_tokens=12, temperature=0.0))
    assert len({id(v.engine.model) for v in chat_models.values()}) == 1
    said = {name: "".join(voice.answer("Hello?")) for name, voice in chat_models.items()}
    assert said == {"base": greedy_by_transformers(runs["base"], "Hello?", 12),
                    "sft": greedy_by_transformers(f"{runs['sft']}/model", "Hello?", 12),
                    "ppo": greedy_by_transformers(f"{runs['ppo']}/model", "Hello?", 12)}
    assert len(set(said.values())) == 3


def test_a_run_whose_base_was_trained_again_is_loaded_by_itself_which_is_said(tmp_path, caplog):
    from tests.factories.chats import greedy_by_transformers

    base = save_tiny(tmp_path / "base")
    sft = lora_run(tmp_path / "sft", base, 1)
    ppo = lora_run(tmp_path / "ppo", f"{sft}/model", 2)
    before = greedy_by_transformers(f"{ppo}/model", "Hello?", 12)
    lora_run(tmp_path / "sft", base, 7)
    models = open_chat_models({"base": base, "sft": sft, "ppo": ppo},
                              SamplingConfig(max_new_tokens=12, temperature=0.0))
    assert models["ppo"].engine.model is not models["base"].engine.model
    assert [r.args[0] for r in caplog.records if "loaded by itself" in r.getMessage()] == ["ppo"]
    assert "".join(models["ppo"].answer("Hello?")) == before


@pytest.mark.parametrize("sign", ["<|im_end|>", "<|turn|>"])
def test_beside_a_model_with_a_template_one_without_takes_it_which_is_said(tmp_path, capsys, sign):
    for name in ("base", "sft"):
        tokenizer, model = tiny_tokenizer(), tiny_causal_lm()
        if name == "sft":
            tokenizer.add_special_tokens({"additional_special_tokens": [sign]})
            model.resize_token_embeddings(len(tokenizer))
            tokenizer.chat_template = "{% for m in messages %}{{ m.content }}" + sign + "{% endfor %}"
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    places, sampling = {name: str(tmp_path / name) for name in ("base", "sft")}, SamplingConfig(max_new_tokens=2)
    models = open_chat_models(places, sampling)
    lacks = "" if sign == "<|im_end|>" else "; <|turn|> is plain text to base"
    assert f"note: base has no chat template: sft's is used{lacks}\n" in capsys.readouterr().err
    assert models["base"].tokenizer.chat_template == models["sft"].tokenizer.chat_template
    "".join(models["base"].answer("Hello?"))
    with pytest.raises(UserError, match="base has no chat template; a model trained here"):
        open_chat_models({"base": places["base"]}, sampling)


# --- commands --------------------------------------------------------------------------------------------------------

def test_compare_asks_all_and_each_keeps_its_own_history(monkeypatch, capsys):
    session = Session({"a": conversation("cat", "cow"), "b": conversation("dog", "hen")})
    code, out, err = typed(monkeypatch, capsys, session, "/compare on", "one?", "two?", "/compare off", "/model a")
    assert (code, out) == (0, "a:\ncat\nb:\ndog\na:\ncow\nb:\nhen\n")
    assert "dog" in session.chat_models["b"].engine.prompts[1]
    assert "dog" not in session.chat_models["a"].engine.prompts[1]
    assert "[a]  b" in err


def test_again_draws_anew_and_edit_asks_otherwise(monkeypatch, capsys):
    talk = conversation("cat", "dog", "cow")
    code, out, _ = typed(monkeypatch, capsys, Session({"m": talk}), "one?", "/again", "/edit two?")
    assert (code, out) == (0, "cat\ndog\ncow\n")
    assert talk.engine.prompts[0] == talk.engine.prompts[1]
    assert talk.engine.seeds == [0, 1, 2]
    assert [m["content"] for m in talk.messages] == ["two?", "cow"]


def test_undo_takes_back_one_exchange_of_all_who_answered(monkeypatch, capsys):
    session = Session({"a": conversation("cat", "cow"), "b": conversation("dog", "hen")})
    typed(monkeypatch, capsys, session, "/compare on", "one?", "two?", "/undo")
    said = [[m["content"] for m in v.messages] for v in session.chat_models.values()]
    assert said == [["one?", "cat"], ["one?", "dog"]]


def test_what_was_saved_is_loaded_and_goes_on(monkeypatch, capsys, tmp_path):
    file = tmp_path / "talk.jsonl"
    typed(monkeypatch, capsys, Session({"m": conversation("cat", system="be brief")}), "one?", f"/save {file}")
    later = conversation("dog")
    _, out, err = typed(monkeypatch, capsys, Session({"m": later}), f"/load {file}", "two?", "/history")
    assert "be brief" in later.engine.prompts[0]
    assert "cat" in later.engine.prompts[0]
    assert (out, "3 messages read" in err, "assistant: dog" in err) == ("dog\n", True, True)
    for row in ({"messages": [{"role": "user", "content": 3}]}, {"messages": []}, {"prompt": "x"}):
        file.write_text(json.dumps(row))
        code, _, err = typed(monkeypatch, capsys, Session({"m": conversation()}), f"/load {file}")
        assert (code, err.count("\n"), "holds no conversation" in err) == (2, 1, True), err


def test_another_system_message_starts_anew(monkeypatch, capsys):
    talk = conversation("cat", "dog")
    typed(monkeypatch, capsys, Session({"m": talk}), "one?", "/system be kind", "two?")
    assert talk.engine.prompts[1].startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\ntwo?")


def test_a_message_may_have_several_lines(monkeypatch, capsys):
    talk = conversation("cat", "dog", "cow")
    typed(monkeypatch, capsys, Session({"m": talk}), '"""one', "two", 'three"""', "four \\", "five", '"""six"""')
    assert [m["content"] for m in talk.messages if m["role"] == "user"] == ["one\ntwo\nthree", "four \nfive", "six"]


def test_the_score_is_the_reward_models(monkeypatch, capsys, reward_folder):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from hybrid_rlhf.inference.scorer import Scorer

    session = Session({"m": conversation("cat", "dog")}, scorer=Scorer(reward_folder))
    session.scorer.open()
    _, _, err = typed(monkeypatch, capsys, session, "/score on", "one?", "/score off", "two?")
    tokenizer = AutoTokenizer.from_pretrained(reward_folder)
    text = "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\ncat<|im_end|>"
    with torch.no_grad():
        wanted = AutoModelForSequenceClassification.from_pretrained(reward_folder)(
            **tokenizer(text, return_tensors="pt")).logits.item()
    assert f"(score {wanted:.3f})" in err
    assert err.count("(score") == 1


def test_columns_stand_beside_each_other_and_hold_no_escape_sequences():
    from rich.console import Console

    from hybrid_rlhf.inference.chat.repl import columns

    console = Console(file=io.StringIO(), width=60, highlight=False)
    console.print(columns({"sft": "a red\nfox", "ppo": "a blue fox"}, {"sft": "score 0.1", "ppo": "score 0.9"}))
    rows = [line.split() for line in console.file.getvalue().splitlines()]
    assert rows[0] == ["sft", "ppo"]
    assert rows[1] == ["a", "red", "a", "blue", "fox"]
    assert rows[-1] == ["score", "0.1", "score", "0.9"]


def test_piped_questions_to_two_runs_over_the_real_door(runs, capsys, monkeypatch):
    flags = ["--model", f"sft={runs['sft']}", f"ppo={runs['ppo']}", "--max_new_tokens", "6", "--temperature", "0"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello?\n/model sft\nHello?\n"))
    assert repl.main(flags) == 0
    out = capsys.readouterr().out
    assert out.startswith("sft:\n"), "all answer"
    assert out.count("\nppo:\n") == 1 and out.count("sft:\n") == 1, "until one is chosen"
