"""Which roles share a base: layouts worked out by hand, and what is said where they cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.roles.sharing import Layout, RoleConfig, RolesConfig, Start, resolve

SFT, REWARD, OTHER = Start("sft"), Start("reward run"), Start("other")
ALONE = (("actor",), ("ref",), ("critic",), ("reward",))
PAIRS = (("actor", "ref"), ("critic", "reward"))
ALL = (("actor", "ref", "critic", "reward"),)


def starts(actor=SFT, ref=SFT, critic=SFT, reward=SFT, teacher=None) -> dict[str, Start]:
    found = {"actor": actor, "ref": ref, "critic": critic, "reward": reward, "teacher": teacher}
    return {role: start for role, start in found.items() if start}


def layout(share_base="auto", has_lora=True, kind="auto", **named) -> Layout:
    found, line = resolve(RolesConfig(share_base, critic=RoleConfig(kind=kind)), starts(**named), has_lora)
    assert line is None
    return found


@pytest.mark.parametrize(("given", "word"), [
    (True, "all"), (False, "none"), ("all", "all"), ("auto", "auto"), ("pairs", "pairs"), ("none", "none")])
def test_true_is_one_base_for_all_and_false_none(given, word):
    assert RolesConfig(given).sharing == word


@pytest.mark.parametrize(("share_base", "bases", "kind"), [
    ("auto", ALL, "adapter"), (True, ALL, "adapter"), ("pairs", PAIRS, "adapter"), (False, ALONE, "model"),
    ("actor-ref", (("actor", "ref"), ("critic",), ("reward",)), "model"),
    ("critic-reward", (("actor",), ("ref",), ("critic", "reward")), "adapter")])
def test_with_adapters_each_word_has_its_groups_and_a_critic_in_one_is_an_adapter(share_base, bases, kind):
    assert layout(share_base) == Layout(bases, kind)


def test_without_adapters_auto_shares_nothing_but_the_states_that_a_head_reads():
    assert layout(has_lora=False) == Layout(ALONE, "model")
    head = Layout((("actor",), ("ref",), ("critic", "reward")), "head")
    assert layout(has_lora=False, kind="head") == layout("critic-reward", has_lora=False, kind="head") == head
    assert layout(kind="head") == Layout(ALL, "head")
    assert head.group("reward") == ("critic", "reward") and head.group("ref") == ("ref",)


def test_a_critic_of_its_own_shares_nothing_and_roles_that_are_not_there_are_in_no_group():
    assert layout(True, kind="model") == Layout((("actor", "ref", "reward"), ("critic",)), "model")
    assert layout(critic=None) == Layout((("actor", "ref", "reward"),), "model")
    assert layout(critic=None, reward=None, ref=None) == Layout((("actor",),), "model")
    assert layout("pairs", reward=None) == Layout((("actor", "ref"), ("critic",)), "model")
    assert layout(False, reward=None, kind="model") == Layout((("actor",), ("ref",), ("critic",)), "model")


def test_a_teacher_joins_a_base_of_all_alone_and_only_the_actor_s_own():
    adapter = replace(SFT, adapter="teacher run")
    assert layout(teacher=adapter) == Layout((("actor", "ref", "critic", "reward", "teacher"),), "adapter")
    assert layout("pairs", teacher=adapter) == Layout((*PAIRS, ("teacher",)), "adapter")
    for other in (OTHER, replace(SFT, dtype="bfloat16"), replace(SFT, quantize="4bit")):
        assert layout(True, teacher=other) == Layout((*ALL, ("teacher",)), "adapter")


NOT_ALL = "roles.share_base auto: not one base for all, for the actor starts from sft and the "


@pytest.mark.parametrize(("named", "bases", "line"), [
    ({"reward": replace(REWARD, reason="it trained all weights")}, (("actor", "ref", "critic"), ("reward",)),
     "reward from reward run (it trained all weights); sharing: actor with ref with critic"),
    ({"critic": REWARD, "reward": REWARD}, PAIRS,
     "critic from reward run; sharing: actor with ref and critic with reward"),
    ({"critic": REWARD, "reward": REWARD, "teacher": SFT}, (*PAIRS, ("teacher",)),
     "critic from reward run; sharing: actor with ref and critic with reward"),
    ({"reward": REWARD, "teacher": SFT}, (("actor", "ref", "critic", "teacher"), ("reward",)),
     "reward from reward run; sharing: actor with ref with critic with teacher"),
    ({"ref": OTHER}, (("actor",), ("ref",), ("critic", "reward")), "ref from other; sharing: critic with reward"),
    ({"critic": OTHER, "reward": REWARD}, (("actor", "ref"), ("critic",), ("reward",)),
     "critic from other; sharing: actor with ref"),
    ({"ref": Start("another"), "critic": OTHER, "reward": REWARD}, ALONE,
     "ref from another; sharing: no two roles")])
def test_where_auto_cannot_have_one_base_it_shares_what_it_can_and_says_why(named, bases, line):
    found, told = resolve(RolesConfig(), starts(**named), True)
    is_sharing = ("critic",) not in bases
    assert found == Layout(bases, "adapter" if is_sharing else "model") and told == NOT_ALL + line


@pytest.mark.parametrize(("named", "bases", "line"), [
    ({"reward": REWARD}, (("actor", "ref"), ("critic",), ("reward",)),
     "reward from reward run; sharing: actor with ref"),
    ({"ref": OTHER}, ALONE, "ref from other; sharing: no two roles")])
def test_a_critic_of_its_own_shares_nothing_in_what_is_left_for_auto_either(named, bases, line):
    found = resolve(RolesConfig(critic=RoleConfig(kind="model")), starts(**named), True)
    assert found == (Layout(bases, "model"), NOT_ALL + line)


def refused(share_base="auto", has_lora=True, kind="auto", named=None, **configs) -> str:
    with pytest.raises(UserError) as found:
        resolve(RolesConfig(share_base, critic=RoleConfig(kind=kind), **configs), starts(**(named or {})), has_lora)
    return str(found.value)


def test_what_was_asked_for_and_cannot_be_is_refused_with_the_first_reason():
    cure = "; fix that, or give roles.share_base auto"
    cannot = "roles that cannot share a base (roles.share_base {}): "
    no_adapters = "a base is shared through low-rank adapters, and model.lora.r is 0 (16, say, turns them on)"
    assert refused(True, False) == cannot.format("True") + no_adapters + cure
    assert refused("actor-ref", False) == cannot.format("actor-ref") + no_adapters + cure
    assert refused("critic-reward", False) == cannot.format("critic-reward") + no_adapters + cure
    assert refused("pairs", named={"ref": OTHER, "critic": REWARD}) == (
        cannot.format("pairs") + "the actor starts from sft and the ref from other" + cure)
    held = replace(SFT, dtype="bfloat16", quantize="4bit")
    assert refused("all", named={"reward": held}) == cannot.format("all") + (
        "the actor is loaded as auto, quantize none, and the reward as bfloat16, quantize 4bit") + cure


def test_a_head_needs_a_reward_model_s_states_and_an_adapter_needs_adapters():
    reads = "roles.critic.kind is head, which reads the reward model's states; "
    assert refused(False, kind="head") == reads + "set roles.share_base to critic-reward, pairs or all"
    none_here = "there is none here: give roles.reward.model_name_or_path, or take another kind"
    assert refused(kind="head", named={"reward": None}) == reads + none_here
    assert refused(has_lora=False, kind="adapter") == (
        "roles.critic.kind is adapter, which needs model.lora.r > 0 (such as 16)")
    assert layout(critic=None, kind="head") == Layout((("actor", "ref", "reward"),), "head")
    assert layout(has_lora=False, critic=None, kind="adapter").kind == "adapter"


def test_only_a_role_with_a_base_of_its_own_can_wait_elsewhere():
    waits = RoleConfig(offload=True)
    assert refused("pairs", reward=waits) == (
        "roles.reward.offload: its base is that of critic too and must stay; leave it out, or set roles.share_base "
        "false")
    assert "its base is that of ref, critic, reward too" in refused(True, actor=waits)
    found, _ = resolve(RolesConfig(False, reward=waits), starts(), True)
    assert found.bases == ALONE
    resolve(RolesConfig(True, reward=waits), starts(reward=None), True)  # nobody's, where there is no such role


@pytest.mark.parametrize(("role", "settings", "told"), [
    ("actor", {"learning_rate": -1e-9}, "roles.actor.learning_rate is -1e-09; it must not be negative, or null"),
    ("ref", {"tp": 0}, "roles.ref.tp is 0; it must be at least 1, or null"),
    ("critic", {"micro_batch_tokens": 0}, "roles.critic.micro_batch_tokens is 0; it must be at least 1, or null"),
    ("critic", {"zero_stage": 4}, "roles.critic.zero_stage is 4; choose 0, 1, 2 or 3"),
    ("reward", {"zero_stage": 2}, "roles.reward.zero_stage is 2 for a role that is not trained; 0 keeps its weights "
                                  "whole, 3 shards them"),
    ("critic", {"kind": "heads"}, "roles.critic.kind is 'heads'; choose auto, model, adapter, head (did you "
                                  "mean head?)"),
    ("actor", {"dtype": "int8"}, "roles.actor.dtype is 'int8'; choose auto, float32, bfloat16, float16"),
    ("reward", {"quantize": "4 bit"}, "roles.reward.quantize is '4 bit'; choose none, 4bit, 8bit (did you mean "
                                      "4bit?)")])
def test_a_setting_out_of_range_is_refused_with_its_range(role, settings, told):
    with pytest.raises(UserError) as found:
        RolesConfig(**{role: RoleConfig(**settings)})
    assert str(found.value) == told
