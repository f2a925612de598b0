"""The Triton kernels without a card: in Triton's interpreter, and compiled for every generation of cards.

In processes of their own, because the interpreter must be switched on before anything imports Triton.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import compile_kernels
import pytest
import torch

from hybrid_rlhf import kernels
from hybrid_rlhf.kernels import cuda, launcher, reference

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONPATH": paths} | environment)


@pytest.mark.slow
@needs_triton
def test_the_kernels_pass_their_tests_in_the_interpreter():
    """All but attention in the form of one of three cards, and draws that are equal to the definition's elsewhere."""
    files = sorted(str(path.relative_to(ROOT)) for path in Path(__file__).parent.glob("test_gpu_*.py"))
    done = run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "-m", "gpu", *files, "-k",
               "not RTX and not exact_distribution", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert len(files) == 5 and "passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-300:]


def test_without_triton_the_reference_is_used_and_says_so(monkeypatch, caplog):
    ours = ("triton_attention", "triton_fused", "triton_layer", "triton_sampling", "triton_scores")
    for name in ("triton", *(f"hybrid_rlhf.kernels.{name}" for name in ours)):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ours:
        monkeypatch.delattr(kernels, name, raising=False)
    ops = kernels.ops_for.__wrapped__("cuda")
    assert ops.name.startswith("reference (Triton is not installed")
    assert ops.decode_attention is kernels.REFERENCE.decode_attention
    assert "cuda kernels: the torch reference is used (Triton is not installed" in caplog.text


NEWEST = ("attend_128_group4", "cut_truncated", "scores_all_backward", "layer_16_gated")  # a case of each mechanism


def compiled(page: Path, *words: str) -> list[dict]:
    """The rows of a run of benchmarks/compile_kernels.py, which fails where a kernel does not fit its card."""
    done = run("benchmarks/compile_kernels.py", "--json", str(page), *words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(page.read_text())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_triton
def test_every_kernel_fits_the_smallest_cards_and_some_the_newest(tmp_path):
    """Turing and Ampere's small cards have the least shared memory and registers; the benchmark tries all others."""
    rows = compiled(tmp_path / "small.json", "--architectures", "75", "86")
    assert {row["case"] for row in rows} == set(compile_kernels.cases())
    assert {row["architecture"] for row in rows} == {75, 86}
    newest = compiled(tmp_path / "newest.json", "--architectures", "90", "120", "--cases", *NEWEST)
    assert {(row["case"], row["architecture"]) for row in newest} == {
        (case, card) for case in NEWEST for card in (90, 120)}
    assert not any(row["faults"] for row in (*rows, *newest))
    kernels_by = {(row["case"], row["architecture"]): row["kernel"] for row in rows}
    assert kernels_by["attend_128_group4", 86] == "_attend_grouped"
    assert kernels_by["attend_128_group4", 75] == "_attend_single"  # Triton has no matrix units there
    some = [row for row in rows if row["case"] in ("attend_128_group4", "scan_truncated")]
    assert len(some) == 1 + 2 + 2 + 3  # attention in the 16-bit types (Turing has one), sampling in fp32 too
    assert all(row["spilled"] == 0 and row["blocks"] >= 2 and row["registers"] > 8 for row in some)


def test_blocks_to_a_processor_by_hand():
    """RTX 30: 65,536 registers, 100 KiB and 1,536 threads a processor; a block takes 1 KiB beside its own."""
    assert compile_kernels.blocks_of(128, 36 * 1024, 4, 86) == 2  # 2 x 37 KiB
    assert compile_kernels.blocks_of(129, 0, 8, 86) == 1  # 136 registers x 256 threads = 34,816
    assert compile_kernels.blocks_of(16, 0, 8, 86) == 6  # x 256 threads
    assert compile_kernels.blocks_of(16, 0, 1, 86) == 16  # at most
    assert compile_kernels.blocks_of(16, 32 * 1024, 1, 75) == 2  # of 64 KiB, nothing beside


def test_what_does_not_fit_spills_or_stands_alone_is_a_fault():
    row = dict(architecture=86, shared=100 * 1024, spilled=17, blocks=1)
    assert compile_kernels.faults_of(row, 2) == [
        "102400 bytes of shared memory, of 101376", "spills 17 bytes", "1 blocks to a processor, not 2"]
    assert compile_kernels.faults_of(dict(architecture=86, shared=99 * 1024, spilled=16, blocks=1), 1) == []


# -- what is left where Triton cannot launch a kernel: torch's own operations, none of which makes the host wait ------


def test_the_fallback_makes_the_host_wait_for_nothing(card):
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, h, 1, 4, generator=g).to("cuda") for h in (4, 2, 2))
    keys, values = torch.randn(2, 5, 2, 9, 4, generator=g).to("cuda").unbind(0)
    slots, positions = torch.tensor([3, 0, 4]).to("cuda"), torch.tensor([7, -1, 0]).to("cuda")
    logits, streams = torch.randn(3, 40, generator=g).to("cuda"), torch.arange(3).to("cuda")
    mask, some, sinks = (torch.rand(3, 8, generator=g) < 0.7).to("cuda"), logits > 1, torch.zeros(4).to("cuda")
    card.reset()
    for options in ({}, {"softcap": 2.0, "sinks": sinks, "mask": mask}):
        reference.decode_attention(query, key, value, keys, values, slots[:, None], positions, 8, scaling=0.5,
                                   **options)
    reference.sample(logits, streams, streams, temperature=0)
    reference.sample(logits, streams, streams, temperature=0.7, top_k=9, top_p=0.9, min_p=0.05,
                     repetition_penalty=1.2, seen=some, forbidden=some)
    assert not card.waits and sum(card.launches.values()) > 20


# -- whether Triton launches -------------------------------------------------------------------------------------------


@pytest.fixture
def launching(monkeypatch):
    """A card is there; returns a function that says what the first launch on it gives or raises. What else is computed
    on it at load, the comparison of log-probabilities, finds nothing wrong."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "why_not", lambda _token_scores: None)

    def gives(outcome):
        def put_seven():
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setitem(sys.modules, "hybrid_rlhf.kernels.triton_trial", SimpleNamespace(put_seven=put_seven))

    return gives


@pytest.fixture
def without_tools(monkeypatch, tmp_path):
    """No C compiler and no Python.h."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(launcher.sysconfig, "get_paths", lambda _scheme: {"include": str(tmp_path)})


def test_a_card_whose_first_launch_succeeds_has_the_triton_kernels(launching):
    launching(7)
    ops = kernels.ops_for.__wrapped__("cuda")
    assert ops.name == "cuda (Triton)" and ops.token_scores is not None


def test_log_probabilities_not_as_defined_there_are_announced_and_left_to_torch(launching, monkeypatch, caplog):
    launching(7)
    monkeypatch.setattr(cuda, "why_not", lambda _token_scores: "in float16 ours differ from their definition")
    ops = kernels.ops_for.__wrapped__("cuda")
    assert ops.token_scores is None and ops.fused is not None
    assert ops.name == "cuda (Triton; log-probabilities by torch: in float16 ours differ from their definition)"
    assert "log-probabilities are torch's (in float16 ours differ from their definition)" in caplog.text


def test_a_launch_that_fails_is_announced_and_torchs_path_taken(launching, caplog):
    launching(RuntimeError("0 active drivers ([]). There should only be one.\nmore"))
    ops = kernels.ops_for.__wrapped__("cuda")
    assert ops.decode_attention is reference.decode_attention and ops.sample is reference.sample
    assert "Triton cannot launch kernels here: 0 active drivers ([]). There should only be one." in caplog.text
    assert "more" not in caplog.text
    launching(0)
    assert "wrote another" in kernels.ops_for.__wrapped__("cuda").name


def test_without_a_compiler_the_package_to_install_is_named(launching, without_tools):
    launching(RuntimeError("Failed to find C compiler."))
    name = kernels.ops_for.__wrapped__("cuda").name
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert "a C compiler (gcc or clang) is missing: apt install gcc" in name
    assert f"Python.h of Python {version} is missing: apt install python{version}-dev" in name


def test_a_full_card_is_no_sign_against_triton(launching):
    launching(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        kernels.ops_for.__wrapped__("cuda")


def test_the_compiler_that_cc_names_is_the_one_that_counts(monkeypatch):
    assert launcher.missing_tools() == []  # of the machine of the tests
    monkeypatch.setenv("CC", "no-such-compiler")
    assert launcher.missing_tools()[0][0] == "the C compiler of CC=no-such-compiler"


@pytest.mark.slow
@needs_triton
def test_the_trial_kernel_writes_seven():
    done = run("-c", "from hybrid_rlhf.kernels.triton_trial import put_seven; print(put_seven('cpu'))",
               TRITON_INTERPRET="1")
    assert done.stdout == "7\n", done.stderr
