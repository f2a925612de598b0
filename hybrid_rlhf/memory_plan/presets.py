"""Settings by the memory of a card, for --preset and `hybrid-rlhf init`. A card is one row."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid_rlhf.core.config import check, nearest


@dataclass(frozen=True)
class Card:
    """gib: memory of the device; None: the CPU, whose memory is not stated. fits: the largest shape of the Qwen2.5
    family whose PPO step (four roles on one base, 8 x (512 + 512) tokens) fits by --plan. settings: options that every
    stage has, with their values.
    """

    gib: int | None
    fits: str
    settings: dict[str, object] = field(default_factory=dict)


_ADAPTERS = {"model.lora.r": 16}
_RECOMPUTED = _ADAPTERS | {"model.gradient_checkpointing": True}
_QUANTISED = _RECOMPUTED | {"model.load_in_4bit": True}
WHY = {  # for the comments of a file that init writes
    "model.lora.r": "adapters of this rank are trained and the base is frozen; 0 trains all weights and takes far more",
    "model.load_in_4bit": "the frozen base in 4 bits (NF4)",
    "model.gradient_checkpointing": "activations are computed again instead of kept: less memory, one more forward",
    "engine.micro_batch_tokens": "tokens of one forward and backward; changes no gradient, only memory and speed",
}
CARDS = {
    "cpu": Card(None, "", _ADAPTERS | {"engine.micro_batch_tokens": 1024}),
    "8gb": Card(8, "3B", _QUANTISED | {"engine.micro_batch_tokens": 1024}),
    "12gb": Card(12, "7B", _QUANTISED | {"engine.micro_batch_tokens": 2048}),
    "16gb": Card(16, "7B", _QUANTISED | {"engine.micro_batch_tokens": 2048}),
    "24gb": Card(24, "14B", _QUANTISED | {"engine.micro_batch_tokens": 8192}),
    "48gb": Card(48, "14B", _RECOMPUTED | {"engine.micro_batch_tokens": 8192}),
    "80gb": Card(80, "32B", _RECOMPUTED | {"engine.micro_batch_tokens": 4096}),
}


def card(name: str, option: str = "--preset") -> Card:
    """The row of that name. Raises UserError, with the nearest name, where there is none."""
    check(name in CARDS, f"{option} {name}: choose {', '.join(CARDS)}{nearest(name, CARDS)}")
    return CARDS[name]


def flags(name: str) -> list[str]:
    """A card's options as words of a command line; later words override them."""
    return [f"--{option}={str(value).lower() if isinstance(value, bool) else value}"
            for option, value in card(name).settings.items()]


def closest(gib: float | None) -> str:
    """The largest row whose memory a device of `gib` has, or nearly has (cards hold a little less than their name
    says); the smallest for a smaller one, "cpu" for none."""
    if gib is None:
        return "cpu"
    sizes = {name: row.gib for name, row in CARDS.items() if row.gib}
    return max((name for name, size in sizes.items() if size <= 1.07 * gib), key=sizes.get, default="8gb")


def mismatch(name: str, gib: float | None) -> str | None:
    """A warning where the row `name` is for a card with more memory than this machine's `gib`, or there is no card."""
    asked, fitting = card(name).gib, closest(gib)
    if (asked or 0) <= (CARDS[fitting].gib or 0):
        return None
    here = "torch finds none here" if gib is None else f"this one has {gib:.0f}"
    return f"warning: --preset {name} is for a card of {asked} GiB, and {here}; this machine's is {fitting}"
