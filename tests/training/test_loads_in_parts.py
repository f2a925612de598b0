"""Which models a run reads in parts: those that its settings put under ZeRO 3, and no others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hybrid_rlhf.engine import ZeroConfig
from hybrid_rlhf.models import load
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.roles.sharing import Layout, RolesConfig, Start
from hybrid_rlhf.training import preferences, step1_sft, step2_reward
from hybrid_rlhf.training.build_roles import Backbone
from tests.factories.tiny import chatml_tokenizer

LAYOUTS = [(3, (), True), (2, (), False), (None, (), False), (None, ("parameters",), True), (3, ("optimizer",), True)]


class Stop(Exception):
    """Enough was seen."""


@pytest.fixture
def asked(monkeypatch) -> list[bool]:
    """How each model was asked for; none is loaded."""
    seen: list[bool] = []

    def opened(*_given: object, in_parts: bool = False) -> None:
        seen.append(in_parts)
        raise Stop

    monkeypatch.setattr(load, "load_causal_lm", opened)
    monkeypatch.setattr(load, "load_scalar_model", opened)
    return seen


@pytest.mark.parametrize(("stage", "offload", "is_cut"), LAYOUTS)
@pytest.mark.parametrize("recipe", [step1_sft, step2_reward, preferences])
def test_a_stage_that_learns_from_rows_reads_its_model_as_it_trains_it(asked, recipe, stage, offload, is_cut) -> None:
    config = recipe.Config(engine=ZeroConfig(zero_stage=stage, offload=list(offload)))
    with pytest.raises(Stop):
        recipe._open(SimpleNamespace(config=config, tokenizer=chatml_tokenizer(), model=ModelConfig("base"), steps=1))
    assert asked == [is_cut]


@pytest.mark.parametrize(("group", "engine", "own", "is_cut"), [
    (("actor",), 3, None, True), (("actor",), 2, None, False), (("actor",), 2, 3, True), (("actor",), 3, 2, False),
    (("actor", "ref"), 3, None, True), (("critic",), 3, None, True), (("reward",), 3, None, True),
    (("reward",), None, None, False), (("ref",), 2, 3, True), (("ref",), 3, 0, False)])
def test_a_role_reads_its_model_as_it_is_laid_out(asked, group, engine, own, is_cut) -> None:
    roles = RolesConfig()
    roles = replace(roles, **{group[0]: replace(roles[group[0]], zero_stage=own)})
    parts = SimpleNamespace(model=ModelConfig("base"), engine=ZeroConfig(zero_stage=engine), roles=roles, seed=0)
    starts = {role: Start("base", None, None, "float32", "none") for role in group}
    with pytest.raises(Stop):
        Backbone(group, parts, starts, Layout((group,), "model"), chatml_tokenizer())
    assert asked == [is_cut]
