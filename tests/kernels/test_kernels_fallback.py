"""What is left where Triton cannot launch a kernel: torch's own operations, none of which makes the host wait."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_rlhf import kernels
from hybrid_rlhf.kernels import cuda, launcher, reference

# What copies to the host, or needs a size that only the card knows; lift_fresh: a number copied to the card unpinned.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "lift_fresh"}


class NoWaits(TorchDispatchMode):
    """Raises where an operation on a card would make the host wait for it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        chosen = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
        if name in WAITS or any(t is not None and t.dtype == torch.bool for t in chosen):
            raise AssertionError(f"{name} makes the host wait")
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("wait", [lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x.sum().item(),
                                  lambda x: x.add_(torch.tensor(1.0))])
def test_the_guard_notices_waits(wait):
    with pytest.raises(AssertionError, match="makes the host wait"), NoWaits():
        wait(torch.ones(3))


def test_attention_of_the_fallback_makes_the_host_wait_for_nothing():
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, h, 1, 4, generator=g) for h in (4, 2, 2))
    keys, values = torch.randn(2, 5, 2, 9, 4, generator=g).unbind(0)
    slots, positions = torch.tensor([3, 0, 4]), torch.tensor([7, -1, 0])
    mask = torch.rand(3, 8, generator=g) < 0.7
    with NoWaits():
        for options in ({}, {"softcap": 2.0, "sinks": torch.zeros(4), "mask": mask}):
            reference.decode_attention(query, key, value, keys, values, slots, positions, 8, scaling=0.5, **options)


def test_sampling_of_the_fallback_makes_the_host_wait_for_nothing():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    streams, positions, some = torch.arange(3), torch.arange(3), logits > 1
    with NoWaits():
        reference.sample(logits, streams, positions, temperature=0)
        reference.sample(logits, streams, positions, temperature=0.7, top_k=9, top_p=0.9, min_p=0.05,
                         repetition_penalty=1.2, seen=some, forbidden=some)


# -- whether Triton launches -------------------------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch):
    """A card is there; returns a function that says what the first launch on it gives or raises. What else is computed
    on it at load, the comparison of log-probabilities, finds nothing wrong."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "why_not", lambda _token_scores: None)

    def launching(outcome):
        def put_seven():
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setitem(sys.modules, "hybrid_rlhf.kernels.triton_trial", SimpleNamespace(put_seven=put_seven))

    return launching


@pytest.fixture
def without_tools(monkeypatch, tmp_path):
    """No C compiler and no Python.h."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(launcher.sysconfig, "get_paths", lambda _scheme: {"include": str(tmp_path)})


def test_a_card_whose_first_launch_succeeds_has_the_triton_kernels(card):
    card(7)
    ops = kernels.ops_for.__wrapped__("cuda")
    assert ops.name == "cuda (Triton)" and ops.token_scores is not None


def test_log_probabilities_that_are_not_as_defined_there_are_announced_and_left_to_torch(card, monkeypatch, caplog):
    card(7)
    monkeypatch.setattr(cuda, "why_not", lambda _token_scores: "in float16 ours differ from their definition")
    ops = kernels.ops_for.__wrapped__("cuda")
    assert ops.token_scores is None and ops.fused is not None
    assert ops.name == "cuda (Triton; log-probabilities by torch: in float16 ours differ from their definition)"
    assert "log-probabilities are torch's (in float16 ours differ from their definition)" in caplog.text


def test_a_launch_that_fails_is_announced_and_torchs_path_taken(card, caplog):
    card(RuntimeError("0 active drivers ([]). There should only be one.\nmore"))
    ops = kernels.ops_for.__wrapped__("cuda")
    assert ops.decode_attention is reference.decode_attention and ops.sample is reference.sample
    assert "Triton cannot launch kernels here: 0 active drivers ([]). There should only be one." in caplog.text
    assert "more" not in caplog.text


def test_a_launch_that_writes_something_else_counts_as_failed(card):
    card(0)
    assert "wrote another" in kernels.ops_for.__wrapped__("cuda").name


def test_without_a_compiler_the_package_to_install_is_named(card, without_tools):
    card(RuntimeError("Failed to find C compiler."))
    name = kernels.ops_for.__wrapped__("cuda").name
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert "a C compiler (gcc or clang) is missing: apt install gcc" in name
    assert f"Python.h of Python {version} is missing: apt install python{version}-dev" in name


def test_a_full_card_is_no_sign_against_triton(card):
    card(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        kernels.ops_for.__wrapped__("cuda")


def test_the_compiler_that_cc_names_is_the_one_that_counts(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert launcher.missing_tools()[0][0] == "the C compiler of CC=no-such-compiler"


def test_the_machine_of_the_tests_lacks_nothing_that_triton_compiles_its_launcher_with():
    assert launcher.missing_tools() == []


@pytest.mark.slow
def test_the_trial_kernel_writes_seven():
    pytest.importorskip("triton")

    code = "from hybrid_rlhf.kernels.triton_trial import put_seven; print(put_seven('cpu'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.stdout == "7\n", done.stderr
