"""Checks before generation: models that cannot generate, requests that are too long, caches that do not fit."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import RankGroup
from hybrid_rlhf.engine.decode.kv_cache import free_bytes
from hybrid_rlhf.engine.decode.pages import page_size
from hybrid_rlhf.engine.decode.runner import Runner
from hybrid_rlhf.models.load import describe_positions, positions_of
from hybrid_rlhf.models.tokenizer import turn_ends


def fitting_slots(runner: Runner, wanted: int, capacity: int, max_bytes: int | None) -> int:
    """How many of the `wanted` slots of `capacity` columns fit in memory. Raises UserError where not even one does."""
    slot_bytes = runner.bytes_per_column * capacity + runner.bytes_per_slot
    allowed = _allowed_bytes(runner, max_bytes)
    if allowed is None or slot_bytes == 0:
        return wanted
    if slot_bytes > allowed:
        raise UserError(f"the cache of one request of {capacity} tokens takes {slot_bytes / 2**20:.1f} MiB and only "
                        f"{allowed / 2**20:.1f} MiB may be used; shorten the prompt or max_new_tokens")
    return min(wanted, int(allowed / slot_bytes))


def fitting_cache(runner: Runner, wanted: int, capacity: int, whole: int, max_bytes: int | None
                  ) -> tuple[int, int | None]:
    """Slots and pages of a cache for `wanted` sequences of `capacity` columns that fits in memory: the wanted slots
    over at most the pages of `whole` ones; or as many slots as fit and None, where they share no pages. Raises
    UserError where not even one sequence fits."""
    size = page_size(runner.device)
    per_slot, allowed = -(-capacity // size), _allowed_bytes(runner, max_bytes)
    pages = min(wanted, whole) * per_slot
    if allowed is not None and runner.bytes_per_column:
        pages = min(pages, int(allowed / (runner.bytes_per_column * size)) - 1)  # one is spare
    if runner.takes_pages and 1 < per_slot <= pages:
        return wanted, pages
    return fitting_slots(runner, wanted, capacity, max_bytes), None


def fitting_capacity(runner: Runner, needed: int, wanted: int, max_bytes: int | None) -> int:
    """How many of the `wanted` columns one slot gets; `needed` at least, or UserError."""
    fitting_slots(runner, 1, needed, max_bytes)
    allowed = _allowed_bytes(runner, max_bytes)
    if allowed is None or runner.bytes_per_column == 0:
        return wanted
    return max(needed, min(wanted, int((allowed - runner.bytes_per_slot) / runner.bytes_per_column)))


def _allowed_bytes(runner: Runner, max_bytes: int | None) -> int | None:
    """Bytes that a cache may take: 90% of the free memory, and at most max_bytes. None: unknown."""
    free = free_bytes(runner.device)
    return min((b for b in (max_bytes, free and int(0.9 * free)) if b is not None), default=None)


def check_reads_images(runner: Runner, ranks: RankGroup | None = None) -> None:
    """Raise UserError where prompts with images cannot be sampled: by transformers' generate, over several ranks."""
    name = type(runner.model).__name__
    if runner.path == "generate":
        why = "; ".join(f"{path}: {reason}" for path, reason in runner.reasons.items())
        raise UserError(f"{name} does not run on the decode engine ({why}), which alone reads images in prompts; "
                        "take another model, or rows without images")
    if ranks:
        raise UserError("prompts with images are not sampled over several ranks; use tp 1")


def check_generates(model: nn.Module) -> None:
    """Raise UserError for a model that is not a causal language model."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(f"{type(model).__name__} is an encoder-decoder; a causal language model is needed to generate")
    if model.get_output_embeddings() is None and not type(model).__name__.endswith("ForCausalLM"):
        raise UserError(f"{type(model).__name__} has no language model head; a causal language model is needed")


def check_turns(runner: Runner, capacity: int) -> None:
    """Raise UserError where sequences of several turns, up to `capacity` tokens long, exceed the model's positions."""
    allowed = _positions(runner)
    if allowed is not None and capacity > allowed:
        raise UserError(f"an episode of up to {capacity} tokens, of the longest prompt (with the tools, and what reset "
                        f"has added to it) and max_new_tokens, exceeds the model's "
                        f"{describe_positions(runner.model.config)}; lower "
                        "max_new_tokens, or make the prompts shorter")


def _positions(runner: Runner) -> int | None:
    return positions_of(runner.model.config)


def check_lengths(runner: Runner, prompts: list[list[int]], limits: Sequence[int]) -> None:
    """Raise UserError for a request that exceeds the model's positions, or with nothing to do."""
    allowed = _positions(runner)
    if min(map(len, prompts), default=1) == 0:
        raise UserError("an empty prompt: there is no token to continue from")
    if min(limits, default=1) < 1:
        raise UserError("a limit of 0 new tokens: at least one token must be sampled")
    for token in runner.ending_ids:
        if any(token in prompt for prompt in prompts):
            raise UserError(f"a prompt holds the pad token {token}, which has no position in "
                            f"{type(runner.model).__name__}; remove it")
    length, limit = max(((len(p), n) for p, n in zip(prompts, limits, strict=True)), key=sum, default=(0, 0))
    if allowed is not None and length + limit > allowed:
        raise UserError(f"a prompt of {length} tokens and max_new_tokens {limit} exceed the model's "
                        f"{describe_positions(runner.model.config)}; shorten one of them")


def stop_ids(model: nn.Module, tokenizer) -> list[int]:  # noqa: ANN001
    """All tokens that end a response: the tokenizer's eos, the ends of a turn in its chat template, and those of the
    model's generation_config."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    configured = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in [tokenizer.eos_token_id, *turn_ends(tokenizer), *configured] if i is not None})
