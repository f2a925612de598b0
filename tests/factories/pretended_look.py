"""A process that looks without torch, for tests of who starts and ends it: the question says what it does."""

from __future__ import annotations

import os
import sys
import time
import types

START = ("import sys; sys.path[:] = sys.argv[2:]; "
         "from tests.factories.pretended_look import main; main()")


def answer(kind: str, asked: dict) -> dict:
    """sleep: seconds; crash: end as a fault does; bytes: memory to take; say: what to answer."""
    if "bytes" in asked:
        asked["kept"] = bytearray(b"x") * asked["bytes"]
    if asked.get("crash"):
        os.abort()
    if asked.get("print"):
        print("not for the studio")
        os.write(1, b"nor this\n")
    if asked.get("input"):
        return {"read": sys.stdin.read()}
    time.sleep(asked.get("sleep", 0))
    if "fault" in asked:
        raise ValueError(asked["fault"])
    return {"kind": kind, "say": asked.get("say"), "pid": os.getpid()}


def main() -> None:
    from hybrid_rlhf.studio import preflight

    own = types.ModuleType("hybrid_rlhf.studio.preflight_answers")
    own.answer = answer
    sys.modules[own.__name__] = own
    preflight.main()
