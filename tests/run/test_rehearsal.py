"""The step that is tried before the first one, for its time."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from hybrid_rlhf.run import loop


def test_a_rehearsal_on_a_card_waits_for_what_the_card_still_computes(monkeypatch):
    """The launches take no time here, and what was launched 0.5 seconds of each token's."""
    clock, launched = [0.0], []
    mask = torch.ones(4, 3)
    loader = SimpleNamespace(batch_size=4, typical=lambda count: SimpleNamespace(attention_mask=mask[:count]))
    trainer = SimpleNamespace(step=lambda batch: launched.append(0.5 * batch.attention_mask.sum().item()))
    monkeypatch.setattr(loop, "preserved", loop.rehearsal)  # no card's generator here
    monkeypatch.setattr(loop, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(loop.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: clock.__setitem__(0, clock[0] + launched.pop()))
    assert loop._rehearse(trainer, loader, tokens=12.0) == 6.0
