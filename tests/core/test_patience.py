"""Processes wait hours for each other in every group: ours, those of ranks that generate together, and DeepSpeed's."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hybrid_rlhf.core import distributed
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig


def patience(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


@pytest.fixture
def joining(monkeypatch):
    """The group is asked for as a launcher's process does, in a world of one."""
    asked = []
    monkeypatch.setenv("RANK", "0"), monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **named: asked.append((given, named)))
    return asked


def test_a_launched_process_joins_with_a_patience_of_hours(joining, monkeypatch):
    distributed.init_process_group()
    ((backend,), named), = joining
    assert backend in ("gloo", "nccl") and named == {"timeout": distributed.PATIENCE}
    assert timedelta(hours=6) <= distributed.PATIENCE


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default group is NCCL's, without a backend for the CPU")
@pytest.mark.parametrize("stage", [0, 2])
def test_the_groups_made_later_have_it_too(stage):
    HybridEngine(torch.nn.Linear(3, 1)).prepare_training(OptimizerConfig(), lambda _step: 1.0, ZeroConfig(stage))
    from deepspeed.utils import groups

    assert patience(groups._WORLD_GROUP) == distributed.PATIENCE
    assert patience(groups._get_data_parallel_group()) == distributed.PATIENCE
    assert patience(distributed.consecutive_ranks(1).group) == distributed.PATIENCE
