"""The child process of preflight.py that answers the page's questions before a run starts: JSON lines in, {"number",
"kind", "asked"}, and JSON lines out, {"number", "answer" or "error", "holds_card"}.

It ends when its standard input ends. Two threads answer quick questions and those that may take minutes.
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

LIGHT = ("options", "settings", "card")
_importing, _writing = threading.Lock(), threading.Lock()


def main() -> None:
    requests, replies = _own_streams()
    quiet_libraries()
    lanes: dict[bool, queue.SimpleQueue] = {is_light: queue.SimpleQueue() for is_light in (True, False)}
    for lane in lanes.values():
        threading.Thread(target=_serve, args=(lane, replies), daemon=True).start()
    for line in requests:
        request = json.loads(line)
        lanes[request["kind"] in LIGHT].put(request)
    os._exit(0)  # does not wait for an unneeded answer


def _own_streams() -> tuple[TextIO, TextIO]:
    """Duplicates of the standard streams; libraries that print or prompt get /dev/null instead."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    return requests, replies


def _serve(lane: queue.SimpleQueue, replies: TextIO) -> None:
    while True:
        request = lane.get()
        text = to_json({"number": request["number"], **reply(request["kind"], request["asked"])})
        with _writing:
            replies.write(f"{text}\n")
            replies.flush()


def reply(kind: str, asked: dict) -> dict:
    """{"answer"} or {"error"}, and whether the process holds GPU memory."""
    try:
        with _importing:  # concurrent imports of one library may see it half initialised
            from hybrid_rlhf.studio.preflight_answers import answer
        result = {"answer": answer(kind, asked)}
    except UserError as error:
        result = {"error": {"status": 400, "text": str(error), "option": getattr(error, "option", None)}}
    except Exception as error:
        text = f"an error of the studio ({type(error).__name__}); its terminal says more"
        result = {"error": {"status": 500, "text": text, "option": None,
                            "traceback": "".join(traceback.format_exception(error))}}
    torch = sys.modules.get("torch")
    return {**result, "holds_card": bool(torch is not None and torch.cuda.is_initialized())}
