"""The parity check of a probe: a model's logits over ragged slots against those of its plain forward."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.tensors import pad_right
from hybrid_rlhf.models.backbone import text_forward, text_logits

PROBE_LENGTHS = (9, 1, 6)  # a prompt of one token starts from a state without a prefill
PROBE_STEPS = 4
# Without a mask, or with a column lost, logits differ by 0.07 or more; over slots those of random models of 2 to 32
# layers in bfloat16 differ by at most 0.026.
_LEAST_BOUNDS, _LEAST_BOUND, _ROUNDINGS = {torch.float32: 1e-4}, 0.05, 4
_BOUNDS: WeakKeyDictionary[nn.Module, dict[torch.dtype, float]] = WeakKeyDictionary()


def probe_sequences(model: nn.Module) -> list[list[int]]:
    """Three ragged sequences, the same each time: 4 decoded tokens after a prompt."""
    size = model.config.get_text_config().vocab_size
    first = min(5, size - 1)  # tokens below are often special, and a pad token may have no position
    return [[first + (7 + 31 * i + 13 * j + i * j) % (size - first) for j in range(n + PROBE_STEPS)]
            for i, n in enumerate(PROBE_LENGTHS)]


def logits_over_slots(runner) -> Tensor:  # noqa: ANN001 - a Runner
    """Logits (3, 4, V) over slots: rows not in slot order, used slots, one prompt prefilled beside another."""
    sequences = probe_sequences(runner.model)
    slots = [0, 1, 2] if runner.is_stateful else [2, 0, 3]  # states have no slot table: row b is slot b
    cache = runner.new_cache(4, max(map(len, sequences)) + 3)
    heads = [s[: n - 1] for s, n in zip(sequences, PROBE_LENGTHS, strict=True)]
    runner.prefill(cache, [heads[0][:5]] * 2, [1, 0], slots[:2])  # earlier sequences in the slots
    cache.clear_states(cache.all_slots)
    if runner.is_stateful:
        runner.prefill(cache, [heads[0][::-1], heads[0]], [1, 0], [slots[0], 3])
        runner.prefill(cache, [heads[2]], [0], slots[2:])
    else:
        runner.prefill(cache, [heads[0][:5], heads[2][:3]], [0, 1], slots[::2])
        runner.extend(cache, [heads[0][5:], heads[2][3:]], slots[::2], [5, 3])  # behind stored columns, as a turn
    runner.measure(cache)
    order = None if runner.is_stateful else torch.tensor(slots, device=runner.device)
    logits = []
    for step in range(PROBE_STEPS):
        columns = [n - 1 + step for n in PROBE_LENGTHS]
        tokens = [s[c] for s, c in zip(sequences, columns, strict=True)]
        logits.append(runner.decode(cache, torch.tensor(tokens, device=runner.device),
                                    torch.tensor(columns, device=runner.device), max(columns) + 1, order).float())
    return torch.stack(logits, 1)


def plain_logits(model: nn.Module, device: torch.device) -> Tensor:
    """Logits (3, 4, V) of the same tokens by the model's plain forward, one sequence at a time."""
    rows = []
    for sequence, length in zip(probe_sequences(model), PROBE_LENGTHS, strict=True):
        logits = _logits(model, torch.tensor([sequence], device=device))[0].float()
        rows.append(logits[length - 1 : length - 1 + PROBE_STEPS])
    return torch.stack(rows)


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    return text_logits(model, text_forward(model)(input_ids=ids, use_cache=False))


def relative_difference(ours: Tensor, truth: Tensor) -> float:
    """Largest difference over the spread of the true logits; infinite where ours are not finite."""
    spread = (truth - truth.mean(-1, keepdim=True)).abs().max().clamp(min=1e-6)
    return float(((ours - truth).abs().max() / spread).nan_to_num(float("inf")))


def padded_logits(model: nn.Module, device: torch.device) -> Tensor:
    """Logits (3, 4, V) of the same tokens by the plain forward of all sequences together, padded on the right."""
    ids = pad_right(probe_sequences(model), 0).to(device)
    logits = _logits(model, ids).float()
    return torch.stack([row[n - 1 : n - 1 + PROBE_STEPS] for row, n in zip(logits, PROBE_LENGTHS, strict=True)])


def probe_bound(model: nn.Module) -> float:
    """The relative difference of logits that rounding explains: four times that between the plain forwards of single
    rows and of the same rows in a padded batch. At least the bound for small models (_LEAST_BOUND), at most four times
    that. Measured once per model, before its weights are sharded.
    """
    weight = next(model.parameters())
    known = _BOUNDS.setdefault(model, {})
    if weight.dtype not in known:
        least = _LEAST_BOUNDS.get(weight.dtype, _LEAST_BOUND)
        with torch.no_grad():
            alone, among = plain_logits(model, weight.device), padded_logits(model, weight.device)
        known[weight.dtype] = min(max(least, _ROUNDINGS * relative_difference(among, alone)), _ROUNDINGS * least)
    return known[weight.dtype]
