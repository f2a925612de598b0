"""The studio: hybrid-rlhf studio --outputs DIR.

A page on this machine for everything from data to a model to talk to: runs, new runs, chat, export. Training runs in
processes of its own, which go on when the page or the studio is closed.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import webbrowser
from pathlib import Path
from typing import Any

from hybrid_rlhf.core.config import UserError, check, command_flags, parse_command
from hybrid_rlhf.core.errors import exit_code
from hybrid_rlhf.core.options import expanded


def parser() -> argparse.ArgumentParser:
    """The flags; errors are a UserError of one line."""
    flags = command_flags("studio", __doc__)
    flags.add_argument("--outputs", type=expanded, metavar="DIR", default="outputs",
                       help="the folder of the runs (%(default)s)")
    flags.add_argument("--port", type=int, default=8090, help="port on 127.0.0.1, 0 for any that is free (%(default)s)")
    flags.add_argument("--no_browser", action="store_true", help="print the address, and open no browser")
    return flags


def parse(argv: list[str] | None) -> argparse.Namespace:
    options = parse_command(parser(), argv)
    check(0 <= options.port < 2**16, f"studio: --port {options.port} is not a port; give one below 65536")
    return options


def outputs_folder(path: str) -> Path:
    """The outputs folder, created if missing. UserError for a file, and for a folder that is not writable."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"studio: --outputs {path}: {error.strerror}; give a folder") from error
    check(os.access(folder, os.W_OK | os.X_OK), f"studio: no right to write in --outputs {path}; give another folder")
    return folder.resolve()


def run(argv: list[str] | None) -> int:
    options = parse(argv)
    folder = outputs_folder(options.outputs)
    try:
        import uvicorn

        from hybrid_rlhf.studio.studio_app import make_app, open_parts
    except ImportError as error:
        raise UserError(f"studio: {error.name} is not installed; pip install 'hybrid-rlhf[serve]'") from error
    from hybrid_rlhf.inference.server.serve import listening
    from hybrid_rlhf.studio.studio import Studio

    taken = listening("127.0.0.1", options.port, has_key=False)
    port, token = taken.getsockname()[1], secrets.token_urlsafe(24)
    studio = Studio(folder)
    routes, closers = open_parts(studio)

    class Server(uvicorn.Server):
        def handle_exit(self, *signals: Any) -> None:  # uvicorn would wait for the tabs' event streams
            studio.news.end()
            super().handle_exit(*signals)

    server = Server(uvicorn.Config(
        make_app(studio, routes, token, port, closers), ws="none", lifespan="on", log_level="error", access_log=False,
        server_header=False, timeout_keep_alive=5, timeout_graceful_shutdown=1))
    taken.listen(128)
    _announce(folder, f"http://127.0.0.1:{port}/?token={token}", options.no_browser)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn stops, then raises the signal again
        signal.signal(number, lambda *_: None)
    server.run(sockets=[taken])
    return 0


def _announce(folder: Path, address: str, is_quiet: bool) -> None:
    print(f"studio of {folder} at {address}", file=sys.stderr, flush=True)
    if not is_quiet and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin"):
        webbrowser.open(address)


def main(argv: list[str] | None = None) -> int:
    """The entry point: returns the exit code (0 stopped by a signal, 2 the input is wrong, 130 interrupted early)."""
    return exit_code(lambda: run(argv))
