"""Untrusted text, made safe to show on a terminal."""

from __future__ import annotations

import re
import unicodedata

# Formatting characters that ordinary writing needs: joiners (emoji, Indic and Persian script), marks of direction that
# end with their character, the soft hyphen.
_MEANT = {0x00AD, 0x061C, 0x200C, 0x200D, 0x200E, 0x200F}
_ORDINARY = re.compile(r"[\n\t\x20-\x7e]*")


def escape_control(text: str) -> str:
    """`text` with every character that could steer a terminal or hide what it says made visible; newline and tab stay.

    A model can be trained or talked into writing escape sequences, which clear the screen, rename the window or retype
    commands, and so can data. C0 controls and DEL become their Unicode pictures (ESC is shown as \u241b). C1 controls,
    direction overrides, invisible and private characters and lone surrogates become codes such as <U+202E>.
    """
    return text if _ORDINARY.fullmatch(text) else "".join(map(_visible, text))


def error_line(error: BaseException) -> str:
    """A UserError as every command prints it: one line, safe to show."""
    return escape_control(" ".join(f"error: {error}".split()))


def shortened(text: str, most: int = 500) -> str:
    """The beginning and the end of a text longer than `most` characters: a pasted megabyte is not printed again."""
    return text if len(text) <= most else f"{text[: most - 105]} ... {text[-100:]}"


def _visible(char: str) -> str:
    code = ord(char)
    if char in "\n\t" or 0x20 <= code < 0x7F:
        return char
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if code not in _MEANT and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co"):
        return f"<U+{code:04X}>"
    return char
