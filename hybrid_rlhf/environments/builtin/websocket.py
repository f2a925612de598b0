"""A WebSocket client of one question at a time (RFC 6455), for servers that keep a session per connection."""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import ssl
import time
from urllib.parse import urlsplit

_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
_TEXT, _CLOSE, _PING, _PONG = 1, 8, 9, 10
_MAX_HEADER = 16_384


class WebSocket:
    """One connection. timeout: seconds for connecting, and for each answer as a whole; max_bytes: of an answer.

    Raises OSError (TimeoutError and ConnectionError among them) for a connection that fails and ValueError for a server
    that speaks another protocol; after either the connection is of no more use.
    """

    def __init__(self, url: str, timeout: float, max_bytes: int) -> None:
        self._timeout, self._max_bytes, self._read = timeout, max_bytes, b""
        self._deadline = time.monotonic() + timeout
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "wss" else 80)
        self._socket = socket.create_connection((parts.hostname or "", port), timeout)
        try:
            if parts.scheme == "wss":
                self._socket = ssl.create_default_context().wrap_socket(self._socket, server_hostname=parts.hostname)
            query = f"?{parts.query}" if parts.query else ""
            self._open((parts.path or "/") + query, parts.netloc.rpartition("@")[2])
        except BaseException:
            self.close()
            raise

    def ask(self, text: str) -> str:
        """Sends one text message and returns the next one that comes."""
        self._deadline = time.monotonic() + self._timeout
        self._send(_TEXT, text.encode())
        parts, size = [], 0
        while True:
            is_last, kind, data = self._frame()
            if kind == _PING:
                self._send(_PONG, data)
            elif kind == _CLOSE:
                raise ConnectionResetError(f"the server closed the connection {data[2:].decode('utf-8', 'replace')}"
                                           .strip())
            elif kind != _PONG:
                parts.append(data)
                size += len(data)
                if size > self._max_bytes:
                    raise ValueError(f"an answer of more than {self._max_bytes} bytes")
                if is_last:
                    return b"".join(parts).decode()

    def close(self) -> None:
        self._socket.close()

    def _open(self, path: str, host: str) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall((f"GET {path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                              f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n").encode("ascii"))
        while b"\r\n\r\n" not in self._read:
            if len(self._read) > _MAX_HEADER:
                raise ValueError("no WebSocket: its header does not end")
            self._receive()
        header, _, self._read = self._read.partition(b"\r\n\r\n")
        first, *lines = header.decode("latin-1").split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if first.split(" ")[1:2] != ["101"]:
            raise ValueError(f"no WebSocket: it answered {first[:80]!r}")
        if fields.get("sec-websocket-accept") != accepted(key):
            raise ValueError("no WebSocket: its key is wrong")

    def _frame(self) -> tuple[bool, int, bytes]:
        """The next frame: whether it ends its message, its kind, and what it holds."""
        first, second = self._take(2)
        size = second & 127
        if size > 125:
            size = int.from_bytes(self._take(2 if size == 126 else 8), "big")
        if second & 128 or first & 112:
            raise ValueError("no WebSocket: a frame that only a client may send, or of an extension")
        if size > self._max_bytes:
            raise ValueError(f"an answer of more than {self._max_bytes} bytes")
        return bool(first & 128), first & 15, self._take(size)

    def _send(self, kind: int, data: bytes) -> None:
        """One frame. A client's are masked, or servers close the connection (section 5.1)."""
        mask, size = os.urandom(4), len(data)
        length = bytes([128 | size]) if size < 126 else (
            bytes([254]) + size.to_bytes(2, "big") if size < 65536 else bytes([255]) + size.to_bytes(8, "big"))
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
        self._socket.settimeout(self._left())
        self._socket.sendall(bytes([128 | kind]) + length + mask + masked)

    def _take(self, size: int) -> bytes:
        while len(self._read) < size:
            self._receive()
        taken, self._read = self._read[:size], self._read[size:]
        return taken

    def _receive(self) -> None:
        self._socket.settimeout(self._left())
        data = self._socket.recv(65536)
        if not data:
            raise ConnectionResetError("the connection was closed in the midst of the answer")
        self._read += data

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no answer within {self._timeout:g} s")
        return left


def accepted(key: str) -> str:
    """What a server must answer to a client's key (section 4.2.2)."""
    return base64.b64encode(hashlib.sha1((key + _GUID).encode()).digest()).decode()
