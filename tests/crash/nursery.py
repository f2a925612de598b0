"""A process that has imported everything and forks one child for each command line it is told, and may kill it.

One JSON request a line on stdin: {"argv", "log", "after": seconds or null, "at": number of a file operation or null}.
The answer, one JSON line: {"code", "seconds", "operations"}. A child starts as fresh processes do, without the seconds
of its imports: many, killed and started again, fit into a test. `at` counts writes, syncs, renames and removals
of checkpoints; the child is killed by SIGKILL before that one happens.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def count_operations(at: int | None) -> list[int]:
    """Count what checkpoints do to files, in this process; at number `at` it kills itself."""
    from hybrid_rlhf.core import own_files
    from hybrid_rlhf.run import checkpoint, tensor_file

    seen = [0]

    def counting(act):
        def counted(*given, **named):
            seen[0] += 1
            if seen[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return act(*given, **named)

        return counted

    for module, names in ((checkpoint, ("_make_room", "_write_files", "_sync", "_finish", "_replace")),
                          (own_files, ("remove_folder", "_exchange", "_remove"))):
        for name in names:
            setattr(module, name, counting(getattr(module, name)))
    tensor_file.write = counting(tensor_file.write)
    return seen


def child(request: dict) -> None:
    """In the forked process: run the command line, and leave the number of file operations beside the log."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1), os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from hybrid_rlhf.cli import main

    seen, code = count_operations(request.get("at")), 1
    try:
        code = main(request["argv"])
    finally:
        Path(request["log"] + ".operations").write_text(str(seen[0]))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import transformers  # noqa: F401

    import hybrid_rlhf.training.all_stages
    import hybrid_rlhf.training.preferences  # noqa: F401

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        request, began = json.loads(line), time.monotonic()
        number = os.fork()
        if number == 0:
            child(request)
        code = _wait(number, began, request.get("after"))
        counted = Path(request["log"] + ".operations")
        operations = int(counted.read_text()) if code >= 0 and counted.exists() else 0
        print(json.dumps({"code": code, "seconds": time.monotonic() - began, "operations": operations}), file=answers)


def _wait(number: int, began: float, after: float | None) -> int:
    """The exit code of child `number`, minus the signal's number where one ended it."""
    while True:
        ended, status = os.waitpid(number, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if after is not None and time.monotonic() - began >= after:
            os.kill(number, signal.SIGKILL)
            after = None
        time.sleep(0.002)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sys.path.insert(0, str(Path(__file__).parents[2]))
    serve()
