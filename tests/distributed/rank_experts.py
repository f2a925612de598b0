"""Mixtures of experts under ZeRO 3 on two processes, one of which has experts without work; see rank_checks.py."""

from __future__ import annotations

import torch
from torch import nn

from hybrid_rlhf.core.distributed import rank
from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engine.train.zero import gathered
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from hybrid_rlhf.roles import Actor, PolicyModule
from tests.factories.tiny import optimizer_step, tiny_causal_lm

KINDS = {"mixtral": dict(num_local_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.1),
         "qwen3_moe": dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8,
                           router_aux_loss_coef=0.1)}
RATE, BUDGETS = 0.5, (24, 400)
SPLITS = [(3, 5), (8, 0)]  # rows of the two processes; in the second step one has none


def batch_of(step: int) -> SequenceBatch:
    generator = torch.Generator().manual_seed(step)
    rows = [torch.randint(4, 300, (int(n),), generator=generator) for n in torch.randint(4, 14, (8,),
                                                                                        generator=generator)]
    mask = length_mask(torch.tensor([len(r) for r in rows]))
    return SequenceBatch(pad_right(rows, 0), mask, mask)


def rows_of(step: int, of_rank: int) -> torch.Tensor:
    return torch.arange(8).split(SPLITS[step])[of_rank]


def model_of(kind: str, has_adapters: bool) -> nn.Module:
    model = tiny_causal_lm(kind=kind, **KINDS[kind])
    if has_adapters:
        add_lora(model, LoraConfig(r=4))
        for name, weight in model.named_parameters():
            if ".lora_B." in name:  # at zero the other half would have no gradient
                nn.init.normal_(weight, std=0.1)
    return model


def trained_weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters() if p.requires_grad])


def plain_step(model: nn.Module, step: int) -> None:
    """By torch alone: the mean over all marked tokens of both processes, and the router's loss of all their tokens."""
    batch = batch_of(step)
    out = model(batch.input_ids, attention_mask=batch.attention_mask, output_router_logits=True)
    labels = batch.input_ids[:, 1:].masked_fill(~batch.loss_mask[:, 1:], -100)
    (nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels.flatten()) + 0.1 * out.aux_loss).backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE).step()
    model.zero_grad()


def under_zero_3(engine: HybridEngine) -> HybridEngine:
    sgd = OptimizerConfig(learning_rate=RATE, max_grad_norm=1e9, optim="sgd")
    return engine.prepare_training(sgd, lambda step: 1.0, ZeroConfig(3))


def compared(ours: nn.Module, theirs: nn.Module, before: torch.Tensor) -> dict:
    with gathered(ours):
        found, expected = trained_weights(ours) - before, trained_weights(theirs) - before
    return {"weights": float((found - expected).norm() / expected.norm()), "moved": float(expected.norm())}


def transformers_case(kind: str, has_adapters: bool) -> dict:
    model, twin = model_of(kind, has_adapters), model_of(kind, has_adapters)
    before = trained_weights(twin)
    actor = Actor(under_zero_3(HybridEngine(PolicyModule(model), model, eos_ids=[3])), None, BUDGETS[rank()])
    for step in range(len(SPLITS)):
        actor.fit_tokens(batch_of(step).rows(rows_of(step, rank())),
                         lambda tokens, count: (-tokens.logprobs.sum() / count, {}))
        plain_step(twin, step)
    return compared(model, twin, before)


class OneOf(nn.Module):
    """Experts as modules of their own, of which a row runs the one that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, states: torch.Tensor, choice: int) -> torch.Tensor:
        return states + self.experts[choice](states).tanh()


class Chosen(nn.Module):
    """An even layer, a choice of experts, an even layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 8), OneOf(), nn.Linear(8, 1)

    def forward(self, states: torch.Tensor, choice: int) -> torch.Tensor:
        return self.last(self.block(self.first(states), choice))


def one_expert_each() -> dict:
    """The first process runs expert 2 alone and the second expert 1 alone."""
    torch.manual_seed(0)
    model = Chosen()
    torch.manual_seed(0)
    twin = Chosen()
    before, states = trained_weights(twin), torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
    engine = under_zero_3(HybridEngine(model))
    optimizer_step(engine, [rank()], lambda which: engine(states[which], (2, 1)[which]).square().mean() / 2)
    sum(twin(states[which], (2, 1)[which]).square().mean() / 2 for which in (0, 1)).backward()
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.grad is not None:
                parameter -= RATE * parameter.grad
    return compared(model, twin, before)


def check_experts() -> dict:
    out = {"one expert each": one_expert_each()}
    for kind in KINDS:
        out[kind] = transformers_case(kind, has_adapters=False)
        out[f"{kind}+lora"] = transformers_case(kind, has_adapters=True)
    return out
