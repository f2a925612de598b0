"""What a probe compares: a model's logits over ragged slots, and those of its plain forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PROBE_LENGTHS = (9, 1, 6)  # a prompt of one token starts from a state that nothing has prefilled
PROBE_STEPS = 4


def probe_sequences(model: nn.Module) -> list[list[int]]:
    """Three ragged sequences, the same each time: 4 decoded tokens after a prompt."""
    size = model.config.get_text_config().vocab_size
    first = min(5, size - 1)  # tokens below are often special, and a pad has no position of its own
    return [[first + (7 + 31 * i + 13 * j + i * j) % (size - first) for j in range(n + PROBE_STEPS)]
            for i, n in enumerate(PROBE_LENGTHS)]


def logits_over_slots(runner) -> Tensor:  # noqa: ANN001 - a Runner
    """Logits (3, 4, V) over slots: rows not in slot order, used slots, one prompt prefilled beside another."""
    sequences = probe_sequences(runner.model)
    slots = [0, 1, 2] if runner.is_stateful else [2, 0, 3]  # states have no slot table: row b is slot b
    cache = runner.new_cache(4, max(map(len, sequences)) + 3)
    heads = [s[: n - 1] for s, n in zip(sequences, PROBE_LENGTHS, strict=True)]
    runner.prefill(cache, [heads[0][:5]] * 2, [1, 0], slots[:2])  # sequences that left before the others came
    cache.clear_states(cache.all_slots)
    if runner.is_stateful:
        runner.prefill(cache, [heads[0][::-1], heads[0]], [1, 0], [slots[0], 3])
        runner.prefill(cache, [heads[2]], [0], slots[2:])
    else:
        runner.prefill(cache, [heads[0], heads[2]], [0, 1], slots[::2])
        runner.prefill(cache, [heads[0][5:]], [0], slots[:1], offset=5)  # behind columns that are there: a chat's turn
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
        logits = model(input_ids=torch.tensor([sequence], device=device), use_cache=False).logits[0].float()
        rows.append(logits[length - 1 : length - 1 + PROBE_STEPS])
    return torch.stack(rows)


def relative_difference(ours: Tensor, truth: Tensor) -> float:
    """Largest difference over the spread of the true logits; infinite where ours are not finite."""
    spread = (truth - truth.mean(-1, keepdim=True)).abs().max().clamp(min=1e-6)
    return float(((ours - truth).abs().max() / spread).nan_to_num(float("inf")))


def probe_bound(model: nn.Module) -> float:
    """The relative difference of logits that rounding explains."""
    return 1e-4 if next(model.parameters()).dtype == torch.float32 else 0.05
