"""The studio: hybrid-rlhf studio --outputs DIR.

A page on this machine for everything from data to a model to talk to: runs, new runs, chat, export. Training runs in
processes of its own, which go on when the page or the studio is closed.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import socket
import sys
import webbrowser
from pathlib import Path
from typing import Any

from hybrid_rlhf.core.config import UserError, check, command_flags, parse_command
from hybrid_rlhf.core.errors import exit_code
from hybrid_rlhf.core.hub import is_loopback
from hybrid_rlhf.core.options import expanded

TOKEN_VARIABLE = "HYBRID_RLHF_STUDIO_TOKEN"


def parser() -> argparse.ArgumentParser:
    """The flags; errors are a UserError of one line."""
    flags = command_flags("studio", __doc__)
    flags.add_argument("--outputs", type=expanded, metavar="DIR", default="outputs",
                       help="the folder of the runs (%(default)s)")
    flags.add_argument("--host", default="127.0.0.1",
                       help="address to listen on; 0.0.0.0 lets other devices of the network in, with the token, which "
                            f"is a new one each time unless {TOKEN_VARIABLE} has one (%(default)s)")
    flags.add_argument("--port", type=int, default=8090, help="port, 0 for any that is free (%(default)s)")
    flags.add_argument("--no_browser", action="store_true", help="print the address, and open no browser")
    return flags


def parse(argv: list[str] | None) -> argparse.Namespace:
    options = parse_command(parser(), argv)
    check(0 <= options.port < 2**16, f"studio: --port {options.port} is not a port; give one below 65536")
    check(re.fullmatch(r"|[\w-]{12,}", os.environ.get(TOKEN_VARIABLE, ""), re.ASCII) is not None,
          f"studio: {TOKEN_VARIABLE} cannot be a token; give 12 letters, digits, - or _ at least")
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
    from hybrid_rlhf.inference.server.serve import bound_socket
    from hybrid_rlhf.studio.studio import Studio

    bound = bound_socket("studio", options.host, options.port)
    port, token = bound.getsockname()[1], os.environ.pop(TOKEN_VARIABLE, "") or secrets.token_urlsafe(24)
    studio = Studio(folder)
    routes, closers = open_parts(studio)

    class Server(uvicorn.Server):
        def handle_exit(self, *signals: Any) -> None:  # uvicorn would wait for the tabs' event streams
            studio.news.end()
            super().handle_exit(*signals)

    server = Server(uvicorn.Config(
        make_app(studio, routes, token, port, closers, options.host), ws="none", lifespan="on", log_level="error",
        access_log=False, server_header=False, timeout_keep_alive=5, timeout_graceful_shutdown=1))
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn stops, then raises the signal again, which changes nothing
        signal.signal(number, server.handle_exit)  # and one that comes before uvicorn listens to signals is not lost
    bound.listen(128)  # before the next line is printed, so that clients can connect
    _announce(folder, f"http://{reachable(options.host)}:{port}/?token={token}", options)
    server.run(sockets=[bound])
    return 0


def reachable(host: str) -> str:
    """`host` as it stands in an address; where it means all addresses, this machine's in the default network."""
    if host not in ("0.0.0.0", "::"):
        return f"[{host}]" if ":" in host else host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation (RFC 5737); UDP sends nothing yet
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostname()


def _announce(folder: Path, address: str, options: argparse.Namespace) -> None:
    print(f"studio of {folder} at {address}", file=sys.stderr, flush=True)
    if not is_loopback(options.host):
        print("note: each device in this network that has the address with its token can use the studio and run code "
              "as you; nothing is encrypted (no TLS), so only in a network that you trust", file=sys.stderr, flush=True)
    has_screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin"
    if not options.no_browser and has_screen:
        webbrowser.open(address)


def main(argv: list[str] | None = None) -> int:
    """The entry point: returns the exit code (0 stopped by a signal, 2 the input is wrong, 130 interrupted early)."""
    return exit_code(lambda: run(argv))
