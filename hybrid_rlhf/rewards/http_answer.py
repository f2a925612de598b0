"""What every address answers, a reward service's or a judge's: whether to ask again, and whether it is the whole."""

from __future__ import annotations

from http.client import HTTPResponse

TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # too busy or gone for now (RFC 9110, RFC 6585)


def read_whole(answer: HTTPResponse, most: int | None = None) -> bytes:
    """The answer, without outer space; at most `most` + 1 bytes are read. ConnectionResetError for a part of one."""
    text = answer.read() if most is None else answer.read(most + 1)
    is_cut = most is not None and len(text) > most  # by us
    text = text.strip()
    if not text or (text.startswith(b"{") and not text.endswith(b"}") and not is_cut):  # of one that tells no length
        raise ConnectionResetError("the connection was closed in the midst of the answer")
    return text
