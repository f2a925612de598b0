"""The Triton kernels without a card: in Triton's interpreter, and compiled for every generation of cards.

In processes of their own, because the interpreter must be switched on before anything imports Triton.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import compile_kernels
import pytest

from hybrid_rlhf import kernels

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONPATH": paths} | environment)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("file", ["test_gpu_fused.py", "test_gpu_kernels.py", "test_gpu_layer.py",
                                  "test_gpu_sampling.py", "test_gpu_scores.py"])
def test_the_kernels_pass_their_tests_in_the_interpreter(file):
    done = run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "-m", "gpu",
               f"tests/kernels/{file}", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-300:]


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


@needs_triton
def test_with_triton_a_card_has_the_triton_kernels():
    done = run("-c", "from hybrid_rlhf.kernels import ops_for; print(ops_for('cuda').name)")
    assert done.stdout == "cuda (Triton)\n", done.stderr


def compiled(tmp_path, *words: str) -> list[dict]:
    """The rows of a run of benchmarks/compile_kernels.py, which fails where a kernel does not fit its card."""
    page = tmp_path / "kernels.json"
    done = run("benchmarks/compile_kernels.py", "--json", str(page), *words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(page.read_text())


@pytest.mark.slow
@needs_triton
def test_llamas_attention_and_sampling_fit_small_cards_and_turing(tmp_path):
    rows = compiled(tmp_path, "--cases", "attend_128_group4", "scan_truncated", "--architectures", "75", "86")
    assert len(rows) == 1 + 2 + 2 + 3  # attention in the 16-bit types (Turing has one), sampling in fp32 too
    by = {(row["case"], row["architecture"]): row for row in rows}
    assert by["attend_128_group4", 86]["kernel"] == "_attend_grouped"
    assert by["attend_128_group4", 75]["kernel"] == "_attend_single"  # Triton has no matrix units there
    assert all(row["spilled"] == 0 and row["blocks"] >= 2 and row["registers"] > 8 for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_triton
def test_every_kernel_fits_the_smallest_cards_and_the_newest(tmp_path):
    """Turing and Ampere's small cards have the least shared memory and registers; the benchmark tries three more."""
    rows = compiled(tmp_path, "--architectures", "75", "86", "90", "120")
    assert len({row["case"] for row in rows}) == 78 and {row["architecture"] for row in rows} == {75, 86, 90, 120}
    assert all(not row["faults"] for row in rows)


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
