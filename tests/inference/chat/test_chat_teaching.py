"""Marks on answers at the terminal: what each line makes of the last answer, and the lines that are refused."""

from __future__ import annotations

import io
import json
import sys

import pytest

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.inference.chat import repl
from hybrid_rlhf.inference.chat.session import Session, obey
from hybrid_rlhf.inference.named_models import learns_on
from hybrid_rlhf.inference.teaching import Mark, commands_of
from tests.factories.chats import Noting, conversation, u


def talked(monkeypatch, capsys, *lines: str, answers: tuple[str, ...] = ("cat", "sun", "fox", "red"),
           length: int = 64):
    """The exit code, the marks, the messages and the notices of a chat with these lines."""
    learner, talk = Noting(), conversation(*answers)
    talk.sampling = SamplingConfig(max_new_tokens=length)
    session = Session({"tiny": talk}, more=commands_of(learner))
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    code = repl.talk(session)
    return code, learner.marks, talk, capsys.readouterr().err


def test_plus_and_minus_are_thumbs_on_the_last_answer_after_its_conversation(monkeypatch, capsys):
    code, marks, _, err = talked(monkeypatch, capsys, "one?", "+", "two?", "-")
    assert (code, "learnt 1\nlearnt 2" in err) == (0, True)
    assert marks == [Mark("thumb", [u("one?")], "cat", is_good=True),
                     Mark("thumb", [u("one?"), {"role": "assistant", "content": "cat"}, u("two?")], "sun",
                          is_good=False)]


def test_a_text_takes_the_place_of_the_answer_and_the_conversation_goes_on_from_it(monkeypatch, capsys):
    _, marks, talk, _ = talked(monkeypatch, capsys, "one?", "= a dog", "two?")
    assert marks == [Mark("text", [u("one?")], "a dog", "cat")]
    assert [message["content"] for message in talk.messages] == ["one?", "a dog", "two?", "sun"]


@pytest.mark.parametrize(("number", "kept", "other"), [("1", "cat", "sun"), ("2", "sun", "cat")])
def test_two_asks_again_and_the_number_is_a_pair_whose_better_answer_stays(monkeypatch, capsys, number, kept, other):
    _, marks, talk, err = talked(monkeypatch, capsys, "one?", "/two", number, "1")
    assert marks == [Mark("pair", [u("one?")], kept, other)]
    assert [m["content"] for m in talk.messages] == ["one?", kept, "1", "fox"]  # a number is a question again
    assert "1: cat\n2:" in err and talk.engine.seeds == [0, 1, 2]


def test_retry_asks_again_with_the_same_seed_and_again_with_the_next(monkeypatch, capsys):
    _, _, talk, _ = talked(monkeypatch, capsys, "one?", "/retry", "/again")
    assert talk.engine.seeds == [0, 0, 1]


def test_undo_marks_and_save_without_a_name_are_the_learners(monkeypatch, capsys):
    code, marks, talk, err = talked(monkeypatch, capsys, "one?", "= a dog", "/marks", "/undo", "/marks", "/save")
    assert (code, marks, len(talk.messages)) == (0, [], 2)
    assert "  1 =   one? | a dog" in err and "mark 1 is taken back" in err and "no marks yet" in err
    assert "saved: out/model, from 0 marks" in err


def test_undo_takes_no_other_number_than_that_of_the_last_mark(monkeypatch, capsys):
    code, marks, _, err = talked(monkeypatch, capsys, "one?", "+", "two?", "-", "/undo 1", "/undo x", "/undo 2",
                                "/save")
    assert (code, len(marks)) == (2, 1) and err.count("only the last mark can be taken back, and that is mark 2") == 2
    assert "mark 2 is taken back" in err and "saved: out/model, from 1 mark\n" in err


@pytest.mark.parametrize(("lines", "words"), [
    (["=Plum."], "= TEXT has a space"), (["++"], "+ marks alone"), (["+ nice"], "+ marks alone"),
    (["-1"], "- marks alone"), (["/two", "3"], "3 chooses neither; give 1 or 2, or a space before a question")])
def test_what_is_nearly_a_mark_is_no_question_unless_a_space_is_before_it(monkeypatch, capsys, lines, words):
    code, marks, talk, err = talked(monkeypatch, capsys, "one?", *lines)
    assert (code, marks, words in err, len(talk.messages)) == (2, [], True, 2)
    _, marks, talk, _ = talked(monkeypatch, capsys, "one?", f" {lines[-1]}")
    assert (marks, len(talk.messages)) == ([], 4)


def test_after_a_near_choice_the_choice_is_still_there(monkeypatch, capsys):
    _, marks, _, _ = talked(monkeypatch, capsys, "one?", "/two", "3", "2", "4")
    assert marks == [Mark("pair", [u("one?")], "sun", "cat")]


def test_a_line_with_a_space_before_it_is_a_question_and_no_mark(monkeypatch, capsys):
    _, marks, talk, _ = talked(monkeypatch, capsys, "one?", " +", " = a dog", "/two", " 1",
                                answers=("cat", "sun", "fox", "red", "moon"))
    assert marks == [] and [m["content"] for m in talk.messages if m["role"] == "user"] == [
        "one?", "+", "= a dog", "1"]


def test_a_cut_answer_is_marked_with_a_line_that_says_how_it_is_learnt(monkeypatch, capsys):
    learner = Noting()
    for answer, is_cut in (("cat sun fox red", True), ("cat", False)):
        talk = conversation(answer)
        talk.sampling = SamplingConfig(max_new_tokens=3)
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{answer}?\n+\n"))
        repl.talk(Session({"tiny": talk}, more=commands_of(learner)))
        assert ("learnt without an end" in capsys.readouterr().err) == is_cut
    assert [mark.is_cut for mark in learner.marks] == [True, False]


@pytest.mark.parametrize(("number", "flags"), [("1", (True, False)), ("2", (False, True))])
def test_a_pair_knows_which_of_its_answers_was_cut_and_so_does_the_chat_after_it(monkeypatch, capsys, number, flags):
    """The first of the two answers has three tokens, the longest there are; the second one."""
    _, marks, talk, _ = talked(monkeypatch, capsys, "one?", "/two", number, answers=("sun fox red cat", "cat"),
                               length=3)
    assert [(mark.is_cut, mark.is_other_cut) for mark in marks] == [flags] and talk.was_cut == flags[0]


def test_a_conversation_with_tools_is_not_marked_as_the_mark_would_lose_them(monkeypatch, capsys):
    """/load takes a row's tools."""
    talk = conversation("cat")
    talk.tools = [{"type": "function", "function": {"name": "look"}}]
    session = Session({"tiny": talk}, more=commands_of(Noting()))
    talk.messages = [u("one?"), {"role": "assistant", "content": "cat"}]
    with pytest.raises(UserError, match="without pictures and tools"):
        obey(session, "+")
    talk.tools = []
    talk.messages[1:1] = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]},
                          {"role": "tool", "content": "a cat"}]
    with pytest.raises(UserError, match="without pictures and tools"):
        obey(session, "+")


@pytest.mark.parametrize(("lines", "words"), [
    (["+"], "there is no answer to mark"), (["one?", "/reset", "-"], "there is no answer to mark"),
    (["one?", "="], "give the text"), (["one?", "+", "-"], "is mark 1 already, +; /undo takes it back"),
    (["one?", "+", "= a dog", "= cat", "+"], "is mark 1 already, +; only the last mark can be taken back"),
    (["one?", "/two", "two?", "2"], "no second answer")])
def test_a_mark_without_its_answer_is_refused_in_one_line(monkeypatch, capsys, lines, words):
    code, _, _, err = talked(monkeypatch, capsys, *lines)
    assert (code, words in err) == (2, True)


def test_without_a_learner_the_same_lines_are_questions(monkeypatch, capsys):
    talk = conversation("cat", "sun")
    monkeypatch.setattr(sys, "stdin", io.StringIO("+\n1\n"))
    repl.talk(Session({"tiny": talk}))
    assert [message["content"] for message in talk.messages] == ["+", "cat", "1", "sun"]
    for line in ("/marks", "/two"):
        with pytest.raises(UserError, match=f"{line} is of a chat that learns .*--learn OUTPUT"):
            obey(Session({"tiny": conversation()}), line)


def test_without_a_learner_a_mark_is_told_that_it_was_a_question(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("-\none?\n+\n= dog\n"))
    repl.talk(Session({"tiny": conversation("cat", "sun", "fox", "red")}))
    assert capsys.readouterr().err.count("(asked as a question; it marks an answer where the chat is started") == 2


def test_the_run_itself_as_the_model_is_that_which_it_began_with(tmp_path, capsys):
    (tmp_path / "taught/model").mkdir(parents=True)
    record = {"stage": "chat", "status": "stopped", "config": {"model": {"model_name_or_path": "a/base"}}}
    (tmp_path / "taught/run.json").write_text(json.dumps(record))
    for path in ("taught", "taught/model", "taught/../taught/"):
        assert learns_on(f"{tmp_path}/{path}", f"{tmp_path}/taught") == "a/base"
        assert "taught has learnt on a/base, and goes on from there" in capsys.readouterr().err
    assert learns_on(f"{tmp_path}/other", f"{tmp_path}/taught") == f"{tmp_path}/other"
    (tmp_path / "taught/run.json").write_text(json.dumps(record | {"stage": "dpo"}))
    assert learns_on(f"{tmp_path}/taught", f"{tmp_path}/taught") == f"{tmp_path}/taught"
    assert capsys.readouterr().err == ""


def test_learn_is_refused_with_several_models_and_outside_of_the_command_that_trains(tmp_path):
    with pytest.raises(UserError, match="one model learns"):
        repl.parse(["--model", "a", "b", "--learn", "out"])
    with pytest.raises(UserError, match="without --prompt"):
        repl.parse(["--model", "a", "--learn", "out", "--prompt", "x"])
    with pytest.raises(UserError, match="start it by hybrid-rlhf chat"):
        repl.open_session(repl.parse(["--model", str(tmp_path), "--learn", "out"]))
