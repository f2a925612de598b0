"""A process that watches for the others' failure ends with its own exit code."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.test_dist import ROOT, free_port

CHILDREN = """
import json, os, sys, time
import torch.distributed as dist
from hybrid_rlhf.core import distributed, failure

failure._POLL_SECONDS, codes = 0.0001, []
failure.world_size = lambda: 2  # the other one is not needed: nothing is sent to it
for _ in range(8):
    if number := os.fork():
        codes.append(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))
        continue
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
    failure.join()
    time.sleep(0.05)
    sys.exit(3)
print(json.dumps(codes))
"""


def test_the_watching_thread_does_not_abort_a_process_that_ends():
    """Without waiting for the thread about every second one was aborted: exit code -6 after a run that succeeded."""
    done = subprocess.run([sys.executable, "-c", CHILDREN, free_port()], capture_output=True, text=True, cwd=ROOT,
                          timeout=120, check=False)
    assert json.loads(done.stdout) == [3] * 8, done.stderr[-2000:]
