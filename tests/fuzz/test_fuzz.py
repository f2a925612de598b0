"""The fuzzing targets (tests/fuzz) under hypothesis: no traceback, no hang, nothing left. `make fuzz` goes on."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import SEEDS, TARGETS

TOKENS = [b"{", b"}", b"[", b"]", b'"', b",", b":", b"null", b"NaN", b"1e999", b"-0", b"9" * 5000, b"\0", b"\xff",
          b"\r\n", b"\\ud800", b"\xef\xbb\xbf", b"<|im_end|>", b"&a *a", b"!!python/object:os.system",
          b"[" * 500, b'{"a":' * 500]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(
        ["user", "assistant", "\n\nHuman: a\n\nAssistant: b", "<|im_end|>", "true", "", " "]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["role", "content", "from", "value", "text", "type", "x"]), inner, max_size=4), max_leaves=12)


@st.composite
def mutated(draw, name: str) -> bytes:
    """A seed with pieces cut out, doubled, or put in."""
    data = bytearray(draw(st.sampled_from(SEEDS[name])))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 12)))
        data[start:end] = draw(st.sampled_from(TOKENS) | st.binary(max_size=6))
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_lets_nothing_out_but_refusals(name):
    target = TARGETS[name]
    for seed in SEEDS[name]:
        target(seed)

    @given(st.binary(max_size=200) | mutated(name))
    @settings(max_examples=25 if name == "configuration" else 150, deadline=10_000, derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))
    def fuzz(data: bytes) -> None:
        target(data)

    fuzz()


@given(st.lists(VALUES, min_size=1, max_size=5), st.integers(0, 255))
@settings(max_examples=300, deadline=10_000, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_columns_that_hold_anything_are_read_or_refused(values, which):
    TARGETS["schema"](bytes([which]) + json.dumps(values).encode())


@given(VALUES, st.sampled_from(["messages", "temperature", "stop", "seed", "n", "stream_options", "tools", "prompts"]))
@settings(max_examples=200, deadline=10_000, derandomize=True, database=None)
def test_a_body_that_holds_anything_is_read_or_refused(value, where):
    for first in (b"\x00", b"\xff"):
        TARGETS["server_body"](first + json.dumps({"messages": [{"role": "user", "content": "x"}], "completions": [],
                                                   "prompts": [], where: value}).encode())
