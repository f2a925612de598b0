"""Models with experts train: the router's loss, adapters on fused experts, and every stage on two architectures."""

import copy
import functools
import warnings

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data.collate import collate_pairs, collate_sft
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.export.folder import export
from hybrid_rlhf.models.backbone import hidden_states, hidden_states_and_router_logits, router_coefficient
from hybrid_rlhf.models.lora import LoraConfig, add_lora, lora_layers
from hybrid_rlhf.models.router import Router, router_of
from hybrid_rlhf.models.shared_prefix import RowAttention
from hybrid_rlhf.roles import Actor, PolicyModule, Reference, Reward, Roles
from hybrid_rlhf.trainers.ppo import PPOTrainer
from hybrid_rlhf.trainers.reward import RewardTrainer
from hybrid_rlhf.trainers.sft import SFTTrainer
from tests.factories.architectures import random_model
from tests.factories.merged import merged_state_dict
from tests.factories.shortage import little_memory
from tests.factories.tiny import tiny_causal_lm, tiny_tokenizer
from tests.factories.trainers import PROMPTS, SFT_ROWS, Source, ppo, scalar, settings, trained

KINDS = {"mixtral": dict(num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.1),
         "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8,
                           router_aux_loss_coef=0.1)}
BATCH = collate_sft(SFT_ROWS, 0)


def mixture(kind="mixtral", **changes):
    model = tiny_causal_lm(kind=kind, **KINDS[kind] | changes)
    for name, weight in model.named_parameters():
        if name.endswith("gate.weight"):  # at 0.02 the choice of experts is a toss
            torch.nn.init.normal_(weight, std=0.5)
    return model


def actor(model, max_tokens=8192, rate=1e-3):
    return Actor(trained(HybridEngine(PolicyModule(model), model, eos_ids=[3]), rate), tiny_tokenizer(), max_tokens)


def balance(model, ids, mask):
    """Equations 4-6 of 2101.03961 with top-2 choices, token by token, from the routers' own logits."""
    seen = []
    handles = [layer.mlp.gate.register_forward_hook(lambda *call: seen.append(call[2][0]))
               for layer in model.model.layers]
    model(ids, attention_mask=mask)
    for handle in handles:
        handle.remove()
    probabilities = torch.cat([logits[mask.flatten()] for logits in seen]).softmax(-1)
    share = torch.zeros(4)
    for row in probabilities:
        for expert in sorted(range(4), key=lambda e, row=row: -row[e])[:2]:
            share[expert] += 1 / len(probabilities)
    return 4 * (share * probabilities.mean(0)).sum()


def router_loss(model, batch):
    hidden, logits = hidden_states_and_router_logits(model, batch)
    return hidden, router_of(model).loss(model, batch, hidden, logits)


def test_a_router_that_does_not_choose_has_the_loss_two():
    model = mixture()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.mlp.gate.weight)
    _, loss = router_loss(model, BATCH)
    assert loss.item() == pytest.approx(2.0)  # P_e = 1/4; the shares of two choices add up to 2: 4 x 2 x 1/4


@pytest.mark.parametrize("kind", KINDS)
def test_the_router_s_loss_is_the_formula_over_real_tokens_and_transformers_own(kind):
    model = mixture(kind)
    states, loss = router_loss(model, BATCH)
    assert loss.item() == pytest.approx(balance(model, BATCH.input_ids, BATCH.attention_mask).item(), rel=1e-5)
    whole = model(BATCH.input_ids, attention_mask=BATCH.attention_mask, output_router_logits=True)
    assert loss.item() == pytest.approx(whole.aux_loss.item(), rel=1e-6) and abs(loss.item() - 2) > 1e-3
    assert torch.equal(states, hidden_states(model, BATCH))
    noisy = copy.deepcopy(BATCH)
    noisy.input_ids[~noisy.attention_mask] = 77
    assert router_loss(model, noisy)[1].item() == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("max_tokens", [1, 10, 8192])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sft_gradient_is_that_of_transformers_loss_of_the_whole_batch_however_it_is_cut(kind, max_tokens):
    policy = actor(mixture(kind), max_tokens)
    twin = copy.deepcopy(policy.engine.model)
    metrics = SFTTrainer(policy).step(BATCH).compute()
    out = twin(BATCH.input_ids, attention_mask=BATCH.attention_mask, output_router_logits=True)
    labels = BATCH.input_ids[:, 1:].masked_fill(~BATCH.loss_mask[:, 1:], -100)
    loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels.flatten())
    (loss + 0.1 * out.aux_loss).backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["aux_loss"] == pytest.approx(out.aux_loss.item(), rel=1e-5)
    found = policy.engine.training.state()["exp_avg"]  # a tenth of the clipped gradient after one step of Adam
    scale = 10 * max(1.0, metrics["grad_norm"])
    routers = [n for n, _ in twin.named_parameters() if n.endswith("gate.weight")]
    assert len(routers) == 2
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(scale * found[f"model.{name}"], parameter.grad, rtol=1e-5, atol=1e-6)


def test_a_micro_batch_that_is_split_for_memory_keeps_the_router_s_loss_of_the_minibatch():
    plain, short = actor(mixture()), actor(mixture())
    with little_memory(short.engine.model, "backward", lambda n: n > 9):
        expected, found = (SFTTrainer(policy).step(BATCH).compute() for policy in (plain, short))
    assert short.engine.oom_limits and short.engine.module.training
    for name in ("loss", "aux_loss", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


def test_a_model_with_a_router_loss_of_another_kind_keeps_its_own_and_says_so(caplog):
    model = mixture()
    plain = type(model).forward

    @functools.wraps(plain)  # its parameters are asked for, and remembered for the class
    def forward(self, *given, **named):
        out = plain(self, *given, **named)
        out.aux_loss = out.aux_loss and 3 * out.aux_loss
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "forward", forward)
        policy = actor(model)
        assert policy.engine.module.router == Router(0.1, None) and "a loss of its own" in caplog.text
        metrics = SFTTrainer(policy).step(BATCH).compute()
    assert metrics["aux_loss"] == pytest.approx(
        3 * balance(mixture(), BATCH.input_ids, BATCH.attention_mask).item(), rel=1e-5)


@pytest.mark.parametrize("kind, changes", [("doge", dict(is_moe=False)), ("qwen3_moe", dict(mlp_only_layers=[0, 1]))])
def test_layers_without_experts_train_in_a_type_that_has_them(kind, changes, caplog):
    model = random_model(kind, dict(changes, vocab_size=300, num_experts_per_tok=2))
    assert router_coefficient(model) == 0.001 and router_coefficient(tiny_causal_lm()) == 0
    assert hidden_states_and_router_logits(model, BATCH)[1] in ((), None)
    assert "aux_loss" not in SFTTrainer(actor(model, 40)).step(BATCH).compute()
    assert not caplog.records


@pytest.mark.parametrize(("packing_length", "max_tokens", "saves"), [
    (None, 8192, False), (None, 8192, True), (None, 1, False), (24, 8192, False), (24, 1, True)])
def test_shared_prefixes_and_packed_rows_keep_the_router_s_loss(packing_length, max_tokens, saves, monkeypatch):
    """A token that stands for several rows counts as several, padding for none; the same however it is cut."""
    rows = [{"input_ids": [5, 6, 7, 8, 9, 10 + i, 20 + i], "loss_mask": [0] * 5 + [1] * 2} for i in range(6)]
    batch, calls = collate_sft(rows, 0, packing_length=packing_length), []
    shared, whole = actor(mixture(), max_tokens), actor(mixture(), max_tokens)
    whole.engine.module._can_share = False
    original = RowAttention._attend
    monkeypatch.setattr(RowAttention, "_attend", lambda *given, **named: (
        calls.append(1), original(*given, **named))[1])
    for policy in (shared, whole) if saves else ():
        policy.engine.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = SFTTrainer(whole).step(batch).compute()
    assert not calls
    found = SFTTrainer(shared).step(batch).compute()
    # 2 layers of the trial; alone in its micro-batch a row shares nothing; else as many again where all is computed
    # again, and where a cut minibatch is counted first
    assert len(calls) > 2 or (max_tokens == 1 and packing_length is None)
    for name in ("loss", "aux_loss", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4), name
    for ours, theirs in zip(shared.engine.model.parameters(), whole.engine.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_a_reward_model_with_experts_tells_its_pairs_apart():
    rows = [{"chosen_ids": [5, 6, 7, 3], "rejected_ids": [5, 6, 8, 9, 10, 3], "num_prompt_tokens": 2},
            {"chosen_ids": [11, 12, 13, 14, 3], "rejected_ids": [11, 3], "num_prompt_tokens": 1},
            {"chosen_ids": [15, 16, 3], "rejected_ids": [15, 17, 18, 3], "num_prompt_tokens": 1}]
    trainer = RewardTrainer(Reward(trained(scalar(kind="mixtral", **KINDS["mixtral"]), 1e-2), 14))
    seen = [trainer.step(collate_pairs(rows, 0)).compute() for _ in range(20)]
    assert seen[-1]["loss"] < 0.1 < seen[0]["loss"] and seen[-1]["accuracy"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "has_adapters"), [("mixtral", True), ("qwen3_moe", False)], ids=["lora", "full"])
def test_ppo_learns_to_say_rewarded_tokens_by_a_model_with_experts(kind, has_adapters):
    model = mixture(kind, initializer_range=0.3 if has_adapters else 0.02)  # adapters cannot widen a narrow head
    reference = Reference(HybridEngine(PolicyModule(copy.deepcopy(model)), pad_id=0))
    if has_adapters:
        add_lora(model, LoraConfig(r=8))
    fourth = Source(lambda rollout: ((rollout.response_ids % 4 == 2) & rollout.action_mask).sum(1).float())
    other = ppo(settings(num_ppo_epochs=4, num_minibatches=2, kl_coef=0.0), fourth, rate=1e-2)
    trainer = PPOTrainer(Roles(actor(model, rate=5e-2 if has_adapters else 1e-2), reference, other.roles.critic),
                         other.source, other.config, seed=0)
    seen = [trainer.step(PROMPTS).compute() for _ in range(15)]
    scores = [metrics["reward"] for metrics in seen]
    assert trainer.roles.actor.engine.describe()["path"] == "native"
    assert max(m["engine/logprob_drift"] for m in seen) < 1e-4  # the sampler runs the same experts and adapters
    assert scores[0] < 4 and sum(scores[-3:]) / 3 > scores[0] + 1 and seen[-1]["aux_loss"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_experts_learn_alone_and_survive_merging_and_reloading(kind, tmp_path):
    model = mixture(kind, initializer_range=0.3)
    base = {n: p.detach().clone() for n, p in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(rank_pattern|alpha_pattern|were set but).*")
        add_lora(model, LoraConfig(r=4))
    names = set(lora_layers(model))
    assert {f"model.layers.{i}.mlp.experts{wrapped}" for i in (0, 1) for wrapped in ("", ".base_layer")} < names
    assert not any("gate" in n or "lm_head" in n for n in names) and len(names) == 12  # 4 of attention, 2 of experts
    trainer = SFTTrainer(actor(model, rate=2e-2))
    seen = [trainer.step(BATCH).compute()["loss"] for _ in range(25)]
    assert seen[-1] < 0.5 * seen[0]
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            assert parameter.abs().max() > 0, name
        elif ".lora_" not in name:
            assert torch.equal(parameter, base[name.replace(".base_layer", "")]), name
    twin = tiny_causal_lm(kind=kind, **KINDS[kind])
    twin.load_state_dict(merged_state_dict(model))
    model.eval()
    torch.testing.assert_close(twin(BATCH.input_ids).logits, model(BATCH.input_ids).logits, rtol=1e-4, atol=1e-5)
    export(model, tiny_tokenizer(), tmp_path / "model", [3])  # compares what it wrote with the live model
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


def test_targets_name_experts_as_they_name_layers_and_mistakes_are_one_line():
    model = mixture()
    add_lora(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    assert {n.rsplit(".", 1)[-1] for n in lora_layers(model)} == {"q_proj", "experts"} and len(lora_layers(model)) == 4
    model = mixture()
    add_lora(model, LoraConfig(r=4, target_modules=r".*layers\.1\..*\.gate_up_proj"))
    assert list(lora_layers(model)) == ["model.layers.1.mlp.experts"]
    with pytest.raises(UserError, match=r"matches no layer of MixtralForCausalLM.*down_proj, gate_up_proj, k_proj"):
        add_lora(mixture(), LoraConfig(r=4, target_modules=["w1"]))
    with pytest.raises(UserError, match=r"lora.dropout is 0.1, but the fused experts of MixtralForCausalLM take none"):
        add_lora(mixture(), LoraConfig(r=4, dropout=0.1))
    add_lora(mixture(), LoraConfig(r=4, dropout=0.1, target_modules=["q_proj"]))
