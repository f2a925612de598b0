"""The process that answers what the page asks before a run is started (look.py starts it): lines of JSON in,
{"number", "kind", "asked"}, and lines of JSON out, {"number", "answer" or "error", "holds_card"}.

It reads nothing else and ends when nobody asks any more. Questions that take a moment and those that may take minutes
are answered side by side, in two threads.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from typing import TextIO

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.quiet import quiet_libraries
from hybrid_rlhf.core.strict_json import to_json
from hybrid_rlhf.core.text_safety import escape_control

LIGHT = ("options", "settings", "card")
_importing, _writing = threading.Lock(), threading.Lock()


def main() -> None:
    requests, replies = _own_streams()
    quiet_libraries()
    lanes: dict[bool, queue.SimpleQueue] = {is_light: queue.SimpleQueue() for is_light in (True, False)}
    for lane in lanes.values():
        threading.Thread(target=_serve, args=(lane, replies), daemon=True).start()
    for line in requests:
        asked = json.loads(line)
        lanes[asked["kind"] in LIGHT].put(asked)
    os._exit(0)  # not waiting for an answer that nobody reads


def _own_streams() -> tuple[TextIO, TextIO]:
    """What the process was started with. What reads and prints besides (a library that asks whether it may run code)
    finds nobody."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nobody = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nobody, number)
    return requests, replies


def _serve(lane: queue.SimpleQueue, replies: TextIO) -> None:
    while True:
        asked = lane.get()
        text = to_json({"number": asked["number"], **_reply(asked["kind"], asked["asked"])})
        with _writing:
            replies.write(f"{text}\n")
            replies.flush()


def _reply(kind: str, asked: dict) -> dict:
    try:
        with _importing:  # two threads that import one library see halves of it
            from hybrid_rlhf.studio.look_answers import answer
        found = {"answer": _sendable(answer(kind, asked))}
    except UserError as error:
        found = {"error": {"status": 400, "text": str(error), "option": getattr(error, "option", None)}}
    except Exception as error:
        told = "".join(traceback.format_exception(error))
        found = {"error": {"status": 500, "text": f"an error of the studio ({type(error).__name__}); its terminal says "
                                                  "more", "option": None, "traceback": _sendable(told)}}
    torch = sys.modules.get("torch")
    return {**found, "holds_card": bool(torch is not None and torch.cuda.is_initialized())}


def _sendable(value: object) -> object:
    """The answer with no text that is none in UTF-8."""
    if isinstance(value, dict):
        return {_sendable(key): _sendable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_sendable(each) for each in value]
    if not isinstance(value, str):
        return value
    return value if value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value) else escape_control(value)
