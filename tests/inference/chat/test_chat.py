"""Chatting with a trained model: streaming, turns, commands, interrupts and refusals."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.errors import escape_control
from hybrid_rlhf.engine.decode.runner import Runner
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.inference.chat import repl
from hybrid_rlhf.inference.chat.session import Session
from hybrid_rlhf.inference.conversation import Conversation, open_conversation
from tests.factories.chats import (
    conversation,
    greedy_by_transformers,
    tokenizer_with_template,
)
from tests.factories.tiny import tiny_causal_lm, tiny_scalar_model

ROOT = Path(__file__).resolve().parents[3]
@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_causal_lm(max_position_embeddings=8192).save_pretrained(folder)
    tokenizer_with_template().save_pretrained(folder)
    return folder


def typed(monkeypatch, capsys, talk: Conversation, *lines: str) -> tuple[int, str, str]:
    """Pipe `lines` into the loop; returns the exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    code = repl.talk(Session({"m": talk}))
    return code, *capsys.readouterr()


# --- turns -----------------------------------------------------------------------------------------------------------

def test_each_turn_sees_the_turns_before_it_through_the_saved_template(monkeypatch, capsys):
    talk = conversation("cat", "dog", system="be brief")
    code, out, err = typed(monkeypatch, capsys, talk, "one?", "two?")
    assert (code, out, err) == (0, "cat\ndog\n", "")
    first = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n"
    assert talk.engine.prompts == [
        first, f"{first}cat<|im_end|>\n<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n"]
    assert talk.engine.seeds == [0, 1]


def test_variables_of_the_template_are_set_and_what_a_model_does_not_read_is_named():
    from tests.factories.trl_templates import tokenizer_of

    plain, thinks = conversation("cat"), conversation("cat", tokenizer=tokenizer_of("qwen3"))
    session = Session({"plain": plain, "thinks": thinks})
    assert session.set_template('{"enable_thinking": false}') == {"plain": ["enable_thinking"]}
    "".join(thinks.answer("one?"))
    assert thinks.engine.prompts[-1].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    for wrong in ("enable_thinking", "[1]", '{"a b": 1}'):
        with pytest.raises(UserError, match="--chat_template_kwargs must be a mapping"):
            session.set_template(wrong)


def test_continue_goes_on_from_where_the_last_answer_ended(monkeypatch, capsys):
    talk = conversation("one,", " two")
    code, out, err = typed(monkeypatch, capsys, talk, "/continue", "count", "/continue")
    assert (code, out) == (2, "one,\n two\n") and "no answer to continue" in err
    assert talk.engine.prompts[1] == f"{talk.engine.prompts[0]}one,"
    assert talk.messages[-1] == {"role": "assistant", "content": "one, two"} and len(talk.messages) == 2


def test_reset_forgets_all_but_the_system_message(monkeypatch, capsys):
    talk = conversation("cat", "dog", system="be brief")
    typed(monkeypatch, capsys, talk, "one?", "/reset", "two?")
    assert "one?" not in talk.engine.prompts[1]
    assert "be brief" in talk.engine.prompts[1]


def test_exit_ends_before_the_next_line(monkeypatch, capsys):
    talk = conversation("cat")
    assert typed(monkeypatch, capsys, talk, "one?", "/quit", "two?")[:2] == (0, "cat\n")
    assert len(talk.engine.prompts) == 1


def test_set_changes_the_settings_of_the_next_answer_and_says_so(monkeypatch, capsys):
    talk = conversation("one two three", "one two three")
    _, out, err = typed(monkeypatch, capsys, talk, "?", "/set max_new_tokens=3 temperature=0.25 seed=9", "?")
    assert talk.engine.limits == [64, 3]
    assert talk.engine.seeds == [0, 10]
    assert talk.sampling.temperature == 0.25
    assert "temperature=0.25" in err
    assert "longest" in err
    assert out.splitlines()[0] == "one two three" != out.splitlines()[1]


@pytest.mark.parametrize(("line", "answer"), [
    ("/set temprature=1", "/set knows no temprature (did you mean temperature?)"), ("/set top_k=0.5", "whole number"),
    ("/set temperature=hot", "it takes a number"), ("/set temperature=-1", "temperature is -1"),
    ("/set top_p=0.9 temperature=-1", "temperature is -1"), ("/set temperature", "/set takes temperature=VALUE"),
    ("/rest", "no command /rest (did you mean /reset?)"), ("/save", "/save takes a file name"),
    ("/save nowhere/x.jsonl", "nothing to save"), ("/compare on", "/compare needs several models"),
    ("/score on", "/score needs a reward model"), ("/score maybe", "/score takes on or off"),
    ("/model x", "no model x"), ("/undo", "no question to take back"), ("/again", "no question to take back"),
    ("/edit", "/edit takes the question"), ("/load", "/load takes a file"), ("/load /no/such", "cannot read /no/such"),
    (f"/load {__file__}", "holds no conversation"), ("/load ~nosuch", "home folder"),
    ("/set top_k=9223372036854775808", "top_k is 9223372036854775808; it must lie in [0, 2147483647], such as 0"),
])
def test_a_wrong_command_is_one_line_and_changes_nothing(line, answer, monkeypatch, capsys):
    talk = conversation()
    before = talk.sampling
    code, out, err = typed(monkeypatch, capsys, talk, line)
    assert (code, out, err.count("\n"), answer in err) == (2, "", 1, True), err
    assert talk.sampling == before


def test_save_writes_a_row_that_sft_can_read_and_overwrites_nothing(monkeypatch, capsys, tmp_path):
    file = tmp_path / "talk.jsonl"
    talk = conversation("çat")
    code, _, err = typed(monkeypatch, capsys, talk, "one?", f"/save {file}", f"/save {file}", f"/save {tmp_path}/a/b")
    assert json.loads(file.read_text(encoding="utf-8")) == {
        "messages": [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "çat"}]}
    assert code == 2
    assert f"{file} exists" in err
    assert "cannot write" in err


def test_an_interrupt_stops_the_answer_and_not_the_program(monkeypatch, capsys):
    talk = conversation("cat and more of it", "dog", interrupt_after=2)
    code, out, err = typed(monkeypatch, capsys, talk, "one?", "two?")
    part = talk.messages[1]["content"]
    assert "cat and more of it".startswith(part)
    assert 0 < len(part) < 18
    assert out == f"{part}\n{talk.messages[3]['content']}\n"
    assert (code, "(stopped)" in err, talk.engine.inside, talk.engine.closed) == (0, True, False, 2)


def test_an_answer_that_was_stopped_has_no_end_of_its_own_nor_one_before_a_question_taken_back():
    """What learns from marks asks this of the last answer."""
    talk = conversation("cat and more of it")
    answer = talk.answer("one?")
    next(answer)
    answer.close()
    assert talk.was_cut
    talk.max_positions = 10
    with pytest.raises(UserError):
        list(talk.answer("two?"))
    assert talk.was_cut and len(talk.messages) == 2


def test_an_interrupt_before_the_first_token_takes_the_question_back(monkeypatch, capsys):
    talk = conversation("cat", interrupt_after=0)
    typed(monkeypatch, capsys, talk, "one?")
    assert talk.messages == []


def test_an_answer_gets_the_room_that_the_model_has_left_and_no_room_is_said(monkeypatch, capsys):
    talk = conversation("cat")
    used = len(talk.tokenizer("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    talk.max_positions = used + 5
    code, _, err = typed(monkeypatch, capsys, talk, "hi", "and a much longer question than that")
    assert talk.engine.limits == [5]
    assert (code, "/reset" in err) == (2, True)
    assert [m["content"] for m in talk.messages] == ["hi", "cat"]


def test_escapes_in_the_answer_are_shown_and_not_obeyed(monkeypatch, capsys):
    talk = conversation("a\x1b[2Jb")
    assert typed(monkeypatch, capsys, talk, "one?")[1] == "a␛[2Jb\n"
    assert talk.messages[1]["content"] == "a\x1b[2Jb"


def test_a_template_that_refuses_is_a_user_error():
    talk = conversation("cat", system="x")
    talk.tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    with pytest.raises(UserError, match=r"template refuses it.*no system messages"):
        list(talk.answer("one?"))


# --- a real model, in a process of its own ---------------------------------------------------------------------------

def test_one_prompt_prints_the_greedy_answer_of_transformers_and_nothing_else(model_folder):
    flags = ("--model", str(model_folder), "--prompt", "Hello?", "--temperature", "0", "--max_new_tokens", "20")
    plain = {k: v for k, v in os.environ.items() if k != "HF_HUB_DISABLE_PROGRESS_BARS"}
    done = subprocess.run([sys.executable, "inference/chat", *flags], cwd=ROOT, env=plain, capture_output=True,
                          text=True, encoding="utf-8")
    told = done.stderr.removeprefix("loading the model ...\n")  # which is said where it takes seconds
    assert (done.returncode, told) == (0, "")
    assert done.stdout == escape_control(greedy_by_transformers(model_folder, "Hello?", 20)) + "\n"


def test_piped_turns_repeat_with_the_seed_and_come_one_per_question(model_folder, monkeypatch, capsys):
    def answers(*flags: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("one?\n/set top_k=50\n\nöne?\n"))
        assert repl.main(["--model", str(model_folder), "--max_new_tokens", "8", "--temperature", "1", *flags]) == 0
        out, err = capsys.readouterr()
        assert "top_k=50" in err
        return out

    first = answers()
    assert answers() == first
    assert answers("--seed", "1") != first


@pytest.mark.slow
def test_control_c_in_a_real_process_ends_an_answer_and_the_next_line_is_answered(model_folder):
    process = subprocess.Popen([sys.executable, "inference/chat", "--model", str(model_folder)], cwd=ROOT,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # jobs ignore it
    process.stdin.write(b"/set max_new_tokens=8000 min_new_tokens=8000\none?\n")
    process.stdin.flush()
    process.stdout.read(1)  # the answer has begun, and is far from its end
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(b"/set min_new_tokens=0 max_new_tokens=5\ntwo?\n", timeout=240)
    assert process.returncode == 0, err.decode()
    assert b"(stopped)" in err
    assert b"max_new_tokens=5" in err
    assert b"Traceback" not in err
    assert out.endswith(b"\n")


def wrong_folders(tmp_path: Path, model_folder: Path) -> dict[str, tuple[Path, str]]:
    """Folders that are no model, each with what the refusal must say."""
    import shutil

    def without(name: str, *patterns: str) -> Path:
        return Path(shutil.copytree(model_folder, tmp_path / name, ignore=shutil.ignore_patterns(*patterns)))

    broken, adapter, run = without("broken", "config.json"), tmp_path / "adapter", tmp_path / "run"
    (broken / "config.json").write_text("{not json")
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    shutil.copytree(model_folder, run / "ppo" / "model")
    reward = without("reward", "*.safetensors", "config.json")
    tiny_scalar_model().save_pretrained(reward)
    torn = without("torn")
    (torn / "model.safetensors").write_bytes(b"\x00" * 40)
    bare = without("bare", "chat_template.jinja")
    return {
        "missing": (tmp_path / "nowhere", "does not exist"), "file": (model_folder / "config.json", "is a file"),
        "no config": (without("empty", "*"), "it needs a config.json"), "broken config": (broken, "is not valid JSON"),
        "no weights": (without("weightless", "*.safetensors"), "no weights"), "torn weights": (torn, "is damaged"),
        "no tokenizer": (without("mute", "tokenizer*"), "no tokenizer"), "no template": (bare, "no chat template"),
        "reward model": (reward, "is a reward model"), "adapter": (adapter, "LoRA adapter alone"),
        "run folder": (run, f"did you mean {run}/ppo/model?"),
    }


def test_a_folder_that_is_no_model_is_refused_in_one_line(model_folder, tmp_path, capsys):
    folders = wrong_folders(tmp_path, model_folder)
    capsys.readouterr()
    for name, (folder, reason) in folders.items():
        assert repl.main(["--model", str(folder), "--prompt", "x"]) == 2, name
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), err.startswith("error: ")) == ("", 1, True), (name, err)
        assert reason in err, name


@pytest.mark.parametrize(("flags", "reason"), [
    ([], "no model"), (["--modle", "x"], "did you mean --model?"), (["--model"], "expected at least one argument"),
    (["--model", "x", "--temperature", "hot"], "invalid float value"),
    (["--model", "x", "./y"], "model folder x does not exist"), (["--model", "x", "-y"], "unknown argument -y"),
    (["--model", "x", "--top_p", "2"], "top_p is 2"),
])
def test_wrong_flags_are_refused_in_one_line(flags, reason, capsys):
    assert repl.main(flags) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), reason in err) == ("", 1, True), err


# --- memory -----------------------------------------------------------------------------------------------------------

def test_running_out_of_memory_is_one_line_and_the_next_question_is_answered(model_folder, monkeypatch, capsys):
    made, new_cache = [], Runner.new_cache

    def full_once(self, *given):
        made.append(given)
        if len(made) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")
        return new_cache(self, *given)

    talk = open_conversation(str(model_folder), SamplingConfig(max_new_tokens=3))
    monkeypatch.setattr(Runner, "new_cache", full_once)
    capsys.readouterr()
    code, _, err = typed(monkeypatch, capsys, talk, "too much", "less")
    assert (code, err.count("error: ")) == (2, 1), err
    assert err.startswith("error: out of memory in this conversation; take a turn back (/undo)")
    assert [m["content"] for m in talk.messages if m["role"] == "user"] == ["less"]
