"""An update on a card: the host never waits inside a micro-batch's forward and backward, and 3 times a step at most."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from hybrid_rlhf.data.collate import collate_labelled, collate_pairs, collate_sft
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engine.train import zero
from hybrid_rlhf.engine.train.offload import saved_on_cpu
from hybrid_rlhf.engine.train.optimizers import MASTERED
from hybrid_rlhf.engine.train.zero import ZeroTraining
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from hybrid_rlhf.roles import Actor, Critic, PolicyModule, Reference, Reward, Roles
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.trainers.offline import DPOConfig, OfflineTrainer
from hybrid_rlhf.trainers.ppo import PPOTrainer
from hybrid_rlhf.trainers.reward import RewardTrainer
from hybrid_rlhf.trainers.sft import SFTTrainer
from tests.factories.tiny import tiny_causal_lm, tiny_scalar_model, tiny_tokenizer
from tests.factories.trainers import SFT_ROWS, Source, settings

FEW = 24  # tokens of a micro-batch: a minibatch has several
MOST_OF_A_STEP = 3
PAIRS = [{"chosen_ids": [5, 6, 7, 8, 9, 10, 3], "rejected_ids": [5, 6, 7, 8, 11, 3], "num_prompt_tokens": 4},
         {"chosen_ids": [12, 13, 14, 15, 3], "rejected_ids": [12, 13, 14, 16, 17, 3], "num_prompt_tokens": 3}] * 3
LABELLED = [{"input_ids": [5, 6 + i, 7, 8, 3], "num_prompt_tokens": 2 + i % 2, "label": i % 2 == 0} for i in range(6)]


@pytest.fixture
def steps(card, monkeypatch):
    """What is waited for in each optimizer step: (inside its micro-batches, from the last backward on)."""
    found: list[tuple[Counter, Counter]] = []
    own_forward, own_step = ZeroTraining.__call__, ZeroTraining.step

    def forward(self, *inputs, **named):
        if torch.is_grad_enabled() and not getattr(self, "is_begun", False):
            self.is_begun = True
            card.reset()
        return own_forward(self, *inputs, **named)

    def step(self):
        inside = Counter(card.waits)
        card.reset()
        norm, self.is_begun = own_step(self), False
        found.append((inside, card.waits))
        card.waits = Counter()
        return norm

    monkeypatch.setattr(ZeroTraining, "__call__", forward), monkeypatch.setattr(ZeroTraining, "step", step)
    return found


def engine(model: torch.nn.Module, module: type = PolicyModule, *, trains: bool = True) -> HybridEngine:
    model = model.to("cuda")
    made = HybridEngine(module(model), model if module is PolicyModule else None, eos_ids=[3], pad_id=0)
    return made.prepare_training(OptimizerConfig(), lambda _step: 1.0, ZeroConfig()) if trains else made


def policy(kind: str) -> torch.nn.Module:
    model = tiny_causal_lm(tie_word_embeddings=True)
    if kind == "lora":
        add_lora(model, LoraConfig(r=2))
    return model if kind == "fp32" else model.to(torch.bfloat16)


def actor(kind: str = "bf16") -> Actor:
    return Actor(engine(policy(kind)), tiny_tokenizer(), FEW)


def assert_few_waits(steps: list, num_steps: int, rest: Counter) -> None:
    """rest: what was waited for between the step and the trainer's return."""
    assert len(steps) == num_steps
    for inside, at_the_end in steps:
        assert not inside, inside
        assert sum(at_the_end.values()) <= MOST_OF_A_STEP, at_the_end
    assert sum(rest.values()) + sum(sum(end.values()) for _, end in steps) <= MOST_OF_A_STEP * num_steps, rest


@pytest.mark.parametrize(("kind", "packing"), [("fp32", None), ("bf16", None), ("lora", None), ("bf16", 20)])
def test_an_update_of_sft(card, steps, kind, packing):
    trainer = SFTTrainer(actor(kind))
    batch = collate_sft(SFT_ROWS * 3, 0, packing)
    for _ in range(4):  # DeepSpeed's timer would wait from the third step on
        trainer.step(batch)
    assert_few_waits(steps, 4, card.waits)


def test_activations_on_the_host_do_not_make_it_wait(card, steps, monkeypatch):
    moved = []

    @contextmanager
    def noted(module):
        with saved_on_cpu(module, min_bytes=0) as counts:
            yield
        moved.append(counts["bytes"])

    monkeypatch.setattr(zero, "saved_on_cpu", noted)
    model = policy("bf16").to("cuda")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    made = HybridEngine(PolicyModule(model), model, eos_ids=[3], pad_id=0).prepare_training(
        OptimizerConfig(), lambda _step: 1.0, ZeroConfig(offload=["activations"]))
    SFTTrainer(Actor(made, tiny_tokenizer(), FEW)).step(collate_sft(SFT_ROWS * 3, 0))
    assert min(moved) > 0
    assert_few_waits(steps, 1, card.waits)


def rollout() -> Rollout:
    draw = torch.Generator().manual_seed(0)
    prompts = Prompts([[5, 6, 7, 8, 9, 10]] * 4 + [[11, 12, 13, 14, 15, 16, 17]] * 4, ["x"] * 8, {})
    answers = [torch.randint(4, 60, (n,), generator=draw).tolist() for n in (3, 5, 2, 6, 4, 4, 1, 5)]
    made = Rollout.from_responses(prompts, answers, [True] * 8, 0, ["a"] * 8)
    shape = made.action_mask.shape
    made.logprobs, made.sampled_logprobs, made.ref_logprobs = (torch.full(shape, -4.0 - i) for i in range(3))
    made.values, made.returns = torch.zeros(shape), torch.ones(shape)
    made.advantages = torch.randn(shape, generator=draw)
    return made


@pytest.mark.parametrize("changes", [
    {}, {"policy_loss": "gspo", "old_logprobs": "recompute"}, {"aggregation": "sequence", "kl_in": "loss"}])
def test_updates_of_ppo_with_a_critic_and_of_its_relatives(card, steps, changes):
    critic = Critic(engine(tiny_scalar_model(2).to(torch.bfloat16), ScalarModel), FEW)
    roles = Roles(actor(), Reference(engine(policy("bf16"), trains=False)), critic)
    trainer = PPOTrainer(roles, Source(lambda r: r.action_mask.sum(1).float()), settings(num_minibatches=2, **changes),
                         seed=0)
    trainer.update(rollout())
    assert_few_waits(steps, 4, card.waits)


def test_an_update_of_a_reward_model(card, steps):
    trainer = RewardTrainer(Reward(engine(tiny_scalar_model(1), ScalarModel), FEW))
    trainer.step(collate_pairs(PAIRS, 0))
    assert_few_waits(steps, 1, card.waits)


@pytest.mark.parametrize("loss_type", ["sigmoid", "kto"])
def test_an_update_of_dpo_and_kto(card, steps, loss_type):
    trainer = OfflineTrainer(actor(), Reference(engine(policy("bf16"), trains=False), FEW), DPOConfig(loss_type))
    batch = collate_labelled(LABELLED, 0, 8) if loss_type == "kto" else collate_pairs(PAIRS, 0)
    trainer.step(batch)
    assert_few_waits(steps, 1, card.waits)


def test_a_step_of_many_adapters_is_few_launches(card):
    """448 matrices: the adapters of a model of 32 layers. One by one a step took about 3,100 launches."""
    matrices = [torch.nn.Parameter(torch.randn(4, 8).to(torch.bfloat16).to("cuda")) for _ in range(448)]
    optimizer = MASTERED["adamw"]([{"params": matrices, "weight_decay": 0.0}], OptimizerConfig())
    for matrix in matrices:
        matrix.grad = torch.ones_like(matrix)
    before = [matrix.detach().float().cpu() for matrix in matrices]
    card.reset()
    norm = optimizer.clip(1.0)
    optimizer.step()
    assert sum(card.launches.values()) <= 40, card.launches
    assert norm.item() == pytest.approx((448 * 32) ** 0.5)
    for was, matrix in zip(before, matrices, strict=True):  # Adam's first step is the learning rate
        torch.testing.assert_close(matrix.detach().cpu(), (was - 5e-5).to(torch.bfloat16))
