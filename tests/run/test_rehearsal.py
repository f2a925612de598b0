"""The step that is tried before the first one, for its time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.report.pace import Pace
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


@pytest.mark.parametrize(("first", "count"), [(2, 1), (3, 0)])
def test_a_run_whose_steps_are_done_rehearses_none(monkeypatch, first, count):
    """One that only has its export left goes on where there may be no memory for a step."""
    rehearsed = []
    monkeypatch.setattr(loop, "_rehearse", lambda *_: rehearsed.append(1) or 0.0)
    pace = Pace(3)
    pace.first = first
    reporter = SimpleNamespace(progress=SimpleNamespace(pace=pace), estimate=lambda: None)
    loader = SimpleNamespace(batch_size=4, rows=[{}] * 4, typical=lambda _count: None)
    saver = SimpleNamespace(loader=loader, held_out=None, total_steps=3, trainer=SimpleNamespace(can_rehearse=True),
                            config=SimpleNamespace(eval_steps=0, save_steps=0, max_eval_batches=None))
    loop._forecast(saver, reporter, False, {})
    assert len(rehearsed) == count
