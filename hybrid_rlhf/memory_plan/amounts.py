"""Amounts of memory, read and written."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hybrid_rlhf.core.config import check
from hybrid_rlhf.memory_plan.rates import CARDS

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30,
          "tib": 2**40, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(text: str, option: str) -> int:
    """'24GiB', '24 GB', '512M' or a plain number of bytes -> bytes. Raises UserError that names `option`.

    K, M, G, T and KiB... count by 1024; kB, MB, GB, TB by 1000.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", text)
    unit = match and match.group(2).lower()
    check(match is not None and unit in _UNITS,
          f"{option} {text!r} is not an amount of memory; write a number and a unit, such as 24GiB, 24GB or 800MiB")
    size = int(float(match.group(1)) * _UNITS[unit])
    check(size > 0, f"{option} {text!r} is zero; write a positive amount such as 24GiB")
    check(unit != "" or size >= 2**20, f"{option} {text!r} is {size} bytes; a unit is missing, as in {text.strip()}GiB")
    return size


@dataclass(frozen=True)
class Cards:
    """The cards that a plan is made for, which need not be here: one process per card, of `memory` bytes. usable: what
    torch finds of a card, 97 to 99% of its nominal size (7.8 of 8 GiB, 79.2 of 80); the driver takes the rest. name: of
    CARDS in rates.py, where one was named."""

    hosts: int
    per_host: int
    memory: int
    name: str = ""

    @property
    def world(self) -> int:
        return self.hosts * self.per_host

    @property
    def usable(self) -> int:
        return self.memory * 97 // 100


def parse_cards(text: str, option: str) -> Cards:
    """'80GiB', '8x80GiB' or '2x8x80GiB' (hosts, cards of each, memory of a card), or a card's name in the place of the
    memory: '4090', '8xh100', 'RTX 4060 Ti 16GB'. Raises UserError that names `option`."""
    plain = re.sub(r"nvidia|geforce|rtx|[\s_]|(?<=\w)-(?=[a-z])", "", text.lower())
    *counts, memory = plain.split("x")
    name = next((n for n in sorted(CARDS, key=len, reverse=True) if memory.startswith(n)), "")
    rest = memory[len(name):]
    name = "" if re.fullmatch(r"[kmgt](i?b)?", rest) else name  # an amount that begins as a card's name
    known = ", ".join(f"{key} ({figures.gib} GiB)" for key, figures in CARDS.items())
    check(len(counts) <= 2 and all(re.fullmatch(r"[1-9]\d{0,4}", c) for c in counts),
          f"{option} {text!r} names no cards; write hosts x cards x memory, such as 2x8x80GiB, 8x80GiB or 24GiB, or a "
          f"card's name in the memory's place: {known}")
    is_known = re.fullmatch(rf"({CARDS[name].gib}gi?b)?" if name else r"[\d.]+[kmgt](i?b)?", rest if name else memory)
    check(is_known is not None,
          f"{option} {text!r} is neither an amount of memory (such as 24GiB) nor a card that is known here: {known}")
    hosts, per_host = [1, 1, *map(int, counts)][-2:]
    return Cards(hosts, per_host, CARDS[name].gib << 30 if name else parse_bytes(memory, option), name)


def size_text(size: float) -> str:
    """Bytes for people: '1.5 GiB', '300 MiB', '12 KiB'."""
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if size >= 2**power * (1 if power > 20 else 0.1):
            value = size / 2**power
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{size / 2**10:.0f} KiB"
