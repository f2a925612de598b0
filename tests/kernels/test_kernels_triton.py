"""The Triton kernels without a card: in Triton's interpreter, and compiled for Hopper as far as a compiler goes.

In processes of their own, because the interpreter must be switched on before anything imports Triton.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

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
@pytest.mark.parametrize("file", ["test_gpu_kernels.py", "test_gpu_sampling.py"])
def test_the_kernels_pass_their_tests_in_the_interpreter(file):
    done = run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "-m", "gpu",
               f"tests/kernels/{file}", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-300:]


def test_without_triton_the_reference_is_used_and_says_so(monkeypatch, caplog):
    for name in ("triton", "hybrid_rlhf.kernels.triton_attention", "hybrid_rlhf.kernels.triton_sampling"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("triton_attention", "triton_sampling"):
        monkeypatch.delattr(kernels, name, raising=False)
    ops = kernels.ops_for.__wrapped__("cuda")
    assert ops.name.startswith("reference (Triton is not installed")
    assert ops.decode_attention is kernels.REFERENCE.decode_attention
    assert "cuda kernels: the torch reference is used (Triton is not installed" in caplog.text


@needs_triton
def test_with_triton_a_card_has_the_triton_kernels():
    done = run("-c", "from hybrid_rlhf.kernels import ops_for; print(ops_for('cuda').name)")
    assert done.stdout == "cuda (Triton)\n", done.stderr


@pytest.mark.slow
@needs_triton
def test_the_kernels_compile_to_the_machine_code_of_a_hopper_card(tmp_path):
    done = run("tests/kernels/hopper.py", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("bytes of shared memory") == 7
