"""A command that is refused is one line, and the chat goes on with the conversation that there was."""

from __future__ import annotations

import io
import json
import sys

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine.decode.runner import Runner
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.inference.chat import repl
from hybrid_rlhf.inference.chat.session import Session
from hybrid_rlhf.inference.conversation import open_conversation
from tests.factories.tiny import save_tiny

BEFORE = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "yes"}]
FILES = {"lone.jsonl": '{"messages": [{"role": "user", "content": "\\ud800"}]}', "deep.jsonl": "[" * 5000,
         "system.jsonl": '{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]}',
         "good.jsonl": json.dumps({"messages": BEFORE}), "bytes.jsonl": "\udcff\udcfe"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder to be in, which is home too, with files to load; and a model."""
    folder = tmp_path_factory.mktemp("home")
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    talk = open_conversation(save_tiny(tmp_path_factory.mktemp("model")), SamplingConfig())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        yield talk


def say(talk, *lines: str) -> tuple[int, list[str], list[dict]]:
    """Pipe lines into a chat that has gone on for a turn: its exit code, what it said, and its messages."""
    talk.sampling, talk.seed, talk.system = SamplingConfig(max_new_tokens=3), 0, None
    talk.messages, talk.num_answers = [dict(m) for m in BEFORE], 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        patch.setattr(sys, "stdout", io.StringIO())
        patch.setattr(sys, "stderr", io.StringIO())
        code = repl.talk(Session({"m": talk}))
        return code, sys.stderr.getvalue().splitlines(), talk.messages


@pytest.mark.parametrize(("line", "said"), [
    ("/set top_k=9223372036854775808", "top_k is 9223372036854775808; it must lie in [0, 2147483647], such as 0"),
    ("/set top_k=many", "/set top_k=many: it takes a whole number"), ("/sett top_k=1", "did you mean /set?"),
    (f"/save {'x' * 300}", "File name too long; give another name"), ("/save ~nosuch", "home folder"),
    ("/load ~nosuch", "home folder"), ("/load no/such.jsonl", "No such file or directory; give a file"),
    ("/save good.jsonl", "exists; choose another"), ("/load bytes.jsonl", "holds no conversation"),
    ("/load deep.jsonl", "holds no conversation"), ("/model x", "no model x"), ("/edit", "/edit takes the question")])
def test_what_is_refused_leaves_the_conversation_as_it_was(place, line, said):
    code, errors, messages = say(place, line)
    assert (code, len(errors), messages) == (2, 1, BEFORE)
    assert errors[0].startswith("error: ") and said in errors[0]


def test_a_conversation_is_saved_under_home_and_whole_or_not_at_all(place, monkeypatch):
    assert say(place, "/save ~/mine.jsonl", "/load mine.jsonl", "/save mine.jsonl")[0] == 2
    with open("mine.jsonl", encoding="utf-8") as file:
        assert json.load(file) == {"messages": BEFORE}


def test_text_that_is_no_text_is_asked_and_saved_as_the_server_reads_it(place):
    assert say(place, "/load lone.jsonl", "a\ud800b", "/save lone2.jsonl")[0] == 0
    with open("lone2.jsonl", encoding="utf-8") as file:
        assert [m["content"] for m in json.load(file)["messages"] if m["role"] == "user"] == ["\ufffd", "a\ufffdb"]


def test_running_out_of_memory_is_one_line_and_the_next_question_is_answered(place, monkeypatch):
    made, new_cache = [], Runner.new_cache

    def full_once(self, *given):
        made.append(given)
        if len(made) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")
        return new_cache(self, *given)

    monkeypatch.setattr(Runner, "new_cache", full_once)
    code, said, messages = say(place, "too much", "less")
    assert (code, len(said), len(made)) == (2, 2, 2)
    assert said[0].startswith("error: out of memory in this conversation; take a turn back (/undo)")
    assert [m["content"] for m in messages if m["role"] == "user"] == ["before", "less"]


@pytest.mark.parametrize("value", [2**31, 2**63])
@pytest.mark.parametrize("name", ["top_k", "max_new_tokens"])
def test_no_setting_is_beyond_what_kernels_count_with(name, value):
    with pytest.raises(UserError, match=f"{name} is {value}"):
        SamplingConfig(**{name: value})
