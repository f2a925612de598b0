"""What stands in for the chat's processes: it prints what they print, and says what it was asked.

    python chat_double.py serve --model NAME=DIR ... | export --model CHECKPOINT --output_dir DIR

It does what a model's folder says in its file `does`: a word and, behind it, lines to print. Each process notes itself
in the file that NOTES names.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        asked = json.loads(body or b"{}")
        how = asked.get("how")
        if how == "stream":
            self._stream(asked)
            return
        status = asked.get("status", 200)
        text = json.dumps({"path": self.path, "headers": dict(self.headers.items()), "bytes": len(body)}).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.send_header("retry-after", "7")
        self.send_header("set-cookie", "a=b")
        self.end_headers()
        self.wfile.write(text)

    def _stream(self, asked: dict) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for number in range(asked["events"]):
            event = f"data: {number}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            self.wfile.flush()
            time.sleep(asked.get("pause", 0.0))
        if asked.get("breaks"):
            os._exit(3)
        self.wfile.write(b"0\r\n\r\n")

    do_GET = do_POST = _answer  # noqa: N815 - as http.server asks

    def log_message(self, *_given: object) -> None:
        pass


def note(what: str, **more: object) -> None:
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps({"what": what, "pid": os.getpid(), "at": time.monotonic(), **more}) + "\n")


def end(_number: int, _frame: object) -> None:
    time.sleep(float(os.environ.get("SLOW_END", "0")))
    note("end")
    os._exit(0)


def serve() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("note: a line beside", flush=True)
    print(f"serving m at http://127.0.0.1:{server.server_address[1]}", flush=True)


def main() -> None:
    signal.signal(signal.SIGTERM, end)
    note("begin", words=sys.argv, key=os.environ.get("HYBRID_RLHF_API_KEY"),
         cards=os.environ.get("CUDA_VISIBLE_DEVICES"))
    place = Path(sys.argv[sys.argv.index("--model") + 1].split("=")[-1])
    does = (place / "does").read_text().splitlines() if (place / "does").exists() else ["work"]
    for line in does[1:]:
        print(line, flush=True)
    if does[0] == "fail":
        sys.exit(2)
    if does[0] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if does[0] == "vanish":  # as a run that goes on removes its checkpoints
        os.replace(place, place.parent / "step-00000009")
        (place.parent / "step-00000009" / "does").write_text("work")
        sys.exit(2)
    if sys.argv[1] == "export":
        out = Path(sys.argv[sys.argv.index("--output_dir") + 1])
        out.mkdir()
        (out / "config.json").write_text("{}")
        return
    if does[0] != "hang":
        serve()
    while os.read(0, 4096):  # until the studio ends
        pass
    note("end")


if __name__ == "__main__":
    main()
