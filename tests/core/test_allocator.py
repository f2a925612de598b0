"""oneDNN compiles a product for each number of rows that it meets; what it keeps of them is bounded from the start."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from hybrid_rlhf import cli
from hybrid_rlhf.core.memory import NUM_PRODUCTS, PRODUCT_CACHES

# Of a process as torch has it, and of one whose caches the entry point bounds: resident MiB after 200 and after 500
# products of different lengths. Forked, so that torch is imported once.
CHILD = """
import os
import random
import torch
from hybrid_rlhf.cli import main
def resident():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) // 1024
def grow():
    weight, lengths = torch.ones(64, 192), list(range(1, 501))
    random.Random(0).shuffle(lengths)
    with torch.no_grad():
        for i, rows in enumerate(lengths, 1):
            torch.ops.mkldnn._linear_pointwise(torch.ones(rows, 192), weight, None, "none", [], "")
            if i in (200, 500):
                print("MiB", resident(), flush=True)
if os.fork() == 0:
    grow()
else:
    os.wait()
    main(["--version"])
    grow()
"""


@pytest.mark.skipif(not (sys.platform.startswith("linux") and torch.backends.mkldnn.is_available()),
                    reason="reads /proc, and multiplies by oneDNN")
def test_products_of_ever_new_lengths_do_not_fill_the_memory() -> None:
    free = {name: value for name, value in os.environ.items() if name not in PRODUCT_CACHES}
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, env=free)
    early, late, bounded_early, bounded_late = (
        int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("MiB"))
    assert late - early >= 20  # torch's own: up to 1,024 products in each of two caches
    assert bounded_late - bounded_early <= 5


def test_the_entry_point_bounds_both_caches_unless_the_user_did(monkeypatch, capsys) -> None:
    first, second = PRODUCT_CACHES
    monkeypatch.setenv(first, "7")
    monkeypatch.setenv(second, "")  # so that it is restored afterwards
    monkeypatch.delenv(second)
    cli.main(["--version"])
    assert (os.environ[first], os.environ[second]) == ("7", str(NUM_PRODUCTS))
    assert capsys.readouterr().out.startswith("hybrid-rlhf ")
