"""Whatever a tool returns is text that a model can be shown: of bounded length, and nothing in it steers a terminal."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch

from hybrid_rlhf.environments.calls import shown


class Silent:
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Number(str):
    def __str__(self) -> str:
        raise RuntimeError("no words")


ROUND: list = []
ROUND.append(ROUND)
DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(("value", "text"), [
    ("two\nlines", "two\nlines"), ("", ""), (None, "null"), (True, "true"), (3, "3"), (0.5, "0.5"),
    (math.inf, "Infinity"), ({"a": [1, "é"]}, '{"a": [1, "é"]}'), ((1, 2), "[1, 2]"), ({"b", "a"}, '["a", "b"]'),
    ({"a": {3}}, '{"a": [3]}'),
    (np.float32(0.5), "0.5"), (np.arange(3), "[0, 1, 2]"), ({"x": torch.tensor([1, 2])}, '{"x": [1, 2]}'),
    (b"\x00\xff\x1b", "(3 bytes, which are not text)"), ({"a": b"xy"}, '{"a": "(2 bytes, which are not text)"}'),
    (memoryview(b"abcd"), "(4 bytes, which are not text)"),
    ([{"type": "text", "text": "a"}, {"type": "image", "image": object()}, {"type": "text", "text": "b"}],
     "a(an image, which is not shown)b"),
    (Silent(), "(a Silent, which cannot be shown: RuntimeError)"),
    ([Silent(), 1], "(a list, which cannot be shown: RuntimeError)"), (Number("word"), "word"),
    (ROUND, "(a list, which cannot be shown: ValueError)"),
    ({(1, 2): 3}, "(a dict, which cannot be shown: TypeError)"),
    (10**5000, "(a int, which cannot be shown: ValueError)")], ids=lambda value: type(value).__name__)
def test_each_kind_of_answer_has_a_text(value, text):
    assert shown(value, 100) == text


@pytest.mark.parametrize(("value", "text"), [
    ("\x1b[2Jgone", "␛[2Jgone"), ("\x00\x07", "␀␇"), ("a\r\nb", "a\nb"), ("a\rb", "a␍b"), ("\u202eabc", "<U+202E>abc"),
    ("\ud83d", "\ufffd"), ("\ud83d\ude00", "😀"), ({"k\ud800": "\x1b"}, '{"k\ufffd": "\\u001b"}')])
def test_control_characters_and_lone_surrogates_are_replaced(value, text):
    assert shown(value, 100) == text
    shown(value, 100).encode()


def test_a_long_answer_is_cut_and_says_so():
    cut = "\n[cut here: only the first 5 characters of the answer are shown]"
    assert shown("abcde", 5) == "abcde"
    assert shown("abcdef", 5) == "abcde" + cut
    assert shown([11, 22], 5) == "[11, " + cut
    assert shown(DEEP, 5) == "[[[[[" + cut
    assert shown(DEEP, 100_000) == "(a list, which cannot be shown: RecursionError)"
    assert shown("\x9b" * 3, 5) == "<U+00" + cut  # shown as codes it is longer than it was


def test_no_time_is_spent_on_what_is_cut_off():
    began = time.process_time()
    assert len(shown("\x1b" * 50_000_000, 4000)) < 4100
    assert len(shown(range_of_rows := [{"row": i} for i in range(1_000_000)], 4000)) < 4100
    assert time.process_time() - began < 3, len(range_of_rows)
