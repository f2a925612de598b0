"""What a model says reaches the terminal in whole characters and cannot steer it."""

from __future__ import annotations

import codecs
import gc
import os
import pty
import resource
import select
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf import cli
from hybrid_rlhf.cli import main
from hybrid_rlhf.core.errors import escape_control
from hybrid_rlhf.inference.response_text import AnswerText, pieces
from tests.factories.tiny import tiny_causal_lm, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@given(st.binary(max_size=40))
@settings(max_examples=150, deadline=None)
def test_pieces_together_are_the_text_whatever_the_bytes(raw):
    """The oracle is Python's own incremental UTF-8 decoder; each token of the fake is one byte."""

    class Bytes:
        def decode(self, ids, **_):
            return bytes(ids).decode("utf-8", errors="replace")

    oracle = codecs.getincrementaldecoder("utf-8")(errors="replace")
    assert "".join(pieces(AnswerText(Bytes(), (), ()), raw)) == oracle.decode(raw) + oracle.decode(b"", final=True)


@pytest.mark.parametrize("text", ["naïve café", "日本語のテキスト", "a 👩‍👩‍👧 b 🎉", "مرحبا", "tab\tand\nline"])
def test_no_piece_ends_inside_a_character(text):
    tokenizer = tiny_tokenizer()  # byte-level: each of these characters is several tokens
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    given_out = list(pieces(AnswerText(tokenizer, (), ()), ids))
    assert "".join(given_out) == text
    assert not any("\ufffd" in piece for piece in given_out)
    assert len(given_out) > 1


def test_an_answer_cut_inside_a_character_ends_with_the_replacement_sign():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("x🎉", add_special_tokens=False)["input_ids"][:-1]
    assert "".join(pieces(AnswerText(tokenizer, (), ()), ids)) == "x\ufffd"


def test_the_space_that_a_decoder_drops_at_the_start_is_not_lost_between_tokens():
    class Metaspace:
        def decode(self, ids, **_):
            return "".join(["▁Hello", "▁big", "▁world", "!"][i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert list(pieces(AnswerText(Metaspace(), (), ()), [0, 1, 2, 3])) == ["Hello", " big", " world", "!"]


@pytest.mark.parametrize(("text", "shown"), [
    ("\x1b[2J\x1b]0;title\x07", "␛[2J␛]0;title␇"), ("a\rb\x08c\x00", "a␍b␈c␀"), ("\x7f\x9b31m", "␡<U+009B>31m"),
    ("safe\u202egnp.exe", "safe<U+202E>gnp.exe"), ("\ud800", "<U+D800>"), ("a\u200bb\U000e0041", "a<U+200B>b<U+E0041>"),
    ("tab\tline\nü🎉\u200d", "tab\tline\nü🎉\u200d"),
])
def test_nothing_the_model_writes_can_steer_the_terminal(text, shown):
    assert escape_control(text) == shown


@pytest.mark.slow
def test_at_a_real_terminal_control_c_stops_an_answer_and_then_only_hints(tmp_path):
    """In a pseudo-terminal, where the line discipline turns the typed Ctrl-C into the signal."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    tiny_causal_lm(max_position_embeddings=8192).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job would ignore it
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "inference/chat", "--model", str(tmp_path)])
    seen = b""

    def expect(word: bytes) -> None:
        nonlocal seen
        while word not in seen:
            seen += os.read(terminal, 4096)
        seen = seen.split(word, 1)[1]

    expect(b"you: ")
    os.write(terminal, b"/set min_new_tokens=8000 max_new_tokens=8000\n")
    expect(b"seed=0")
    expect(b"you: ")
    os.write(terminal, b"hello\n")
    expect(b"hello\r\n")  # the echo
    while not seen:
        seen += os.read(terminal, 4096)  # the answer has begun
    os.write(terminal, b"\x03")
    expect(b"(stopped)")
    expect(b"you: ")
    while b"leaves" not in seen:  # the prompt is printed a moment before readline waits, to which a signal between the
        if select.select([terminal], [], [], 1)[0]:  # two is lost: it is typed again
            seen += os.read(terminal, 4096)
        else:
            os.write(terminal, b"\x03")
    expect(b"/exit or Ctrl-D leaves")
    expect(b"you: ")
    os.write(terminal, b"\x04")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# -- every command says what is wrong in one line that cannot steer the terminal, and exits with 2 --------------------


BAD = "no\x1b[2J\nsuch\u202e"


@pytest.mark.parametrize("words", [
    ["--stage", BAD], ["chat", "--model", BAD], ["serve", "--model", BAD, "--port", "0"],
    ["export", "--model", BAD, "--output_dir", "out"], ["doctor", f"--{BAD}"],
    ["init", "--goal", "sft", "--data", BAD, "--model", "m", "--card", "cpu", "--output_dir", "out"]],
    ids=lambda words: words[0])
def test_what_is_wrong_is_one_line_without_control_characters(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ") and "\u241b[2J" in lines[-1] and not list(tmp_path.iterdir())
    assert not any("\x1b" in line or "\u202e" in line for line in lines)
    assert gc.get_threshold()[0] < 10_000  # the start's is put back


def test_a_process_that_runs_out_of_file_descriptors_says_so_in_one_line(monkeypatch, capfd):
    def leak(_argv) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
        held = []
        while True:
            held.append(os.fdopen(os.open(os.devnull, os.O_RDONLY)))

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(cli, "_train", leak)
    try:
        assert main([]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert capfd.readouterr().err == ("error: /dev/null: Too many open files; raise their number (ulimit -n 65536) or "
                                      "find what leaves files open, such as a reward function, and the same command "
                                      "goes on from the last checkpoint\n")
