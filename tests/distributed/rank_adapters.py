"""Adapters of a bfloat16 model on two processes; see rank_checks.py."""

from __future__ import annotations

import torch

from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engine.train.zero import gathered
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from hybrid_rlhf.roles import Actor, PolicyModule
from hybrid_rlhf.training import builders
from tests.distributed.rank_rows import STEPS, moved, own_rows, plain_loss, relative, rows_of, tokens_allowed
from tests.factories.tiny import tiny_causal_lm

# so large an epsilon makes Adam a smooth function of the gradient; else it turns the rounding of gradients near zero
# into whole steps
RATE, BOUND, EPSILON = 4.0, 0.05, 1.0
ADAMW = OptimizerConfig(learning_rate=RATE, max_grad_norm=BOUND, adam_epsilon=EPSILON)


def check_adapters() -> dict:
    """bfloat16 adapters by AdamW at every stage, against torch's on fp32 masters; and dropout."""
    out: dict = {"masks": masks(), "8 bits": check_8_bits()}
    for stage in (None, 1, 3):
        model = adapted_model()
        engine = HybridEngine(PolicyModule(model))
        engine.prepare_training(ADAMW, lambda step: 1.0, ZeroConfig(stage))
        actor, norms, begun = Actor(engine, None, tokens_allowed()), [], masters_of(engine)
        for step in range(STEPS):
            loss = lambda tokens, count: (-tokens.logprobs.sum() / count, {})  # noqa: E731
            norms.append(actor.fit_tokens(rows_of(step)[0].rows(own_rows(step)), loss).compute()["grad_norm"])
        masters = masters_of(engine)
        before, after, expected = masters_by_hand(begun)
        ours, theirs = (moved(w, before) for w in (masters, after))
        out[str(stage)] = {
            "stage": engine.training.stage, "norm": relative(norms, expected), "moved": float(theirs.norm()),
            "weights": float((ours - theirs).norm() / theirs.norm()), "masters": {str(v.dtype) for v in masters.values()
                                                                                  } == {"torch.float32"},
            "dtypes": sorted({str(p.dtype) for p in model.parameters() if p.requires_grad})}
    return out


def check_8_bits() -> dict:
    """bitsandbytes' Adam on each process's part of the weights, beside torch's on its part."""
    out = {}
    for stage in (1, 3):
        ends = []
        for optim in ("adamw", "adamw_8bit"):
            model = tiny_causal_lm()
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            engine = HybridEngine(PolicyModule(model))
            engine.prepare_training(OptimizerConfig(learning_rate=1e-2, optim=optim), lambda step: 1.0,
                                    ZeroConfig(stage))
            for step in range(STEPS):
                Actor(engine, None, tokens_allowed()).fit_tokens(
                    rows_of(step)[0].rows(own_rows(step)), lambda tokens, count: (-tokens.logprobs.sum() / count, {}))
            with gathered(model):
                ends.append(moved({n: p.detach().clone() for n, p in model.named_parameters()}, before))
        bytes_held = [v.numel() for each in engine.training._optimizer.state.values() for v in each.values()
                      if torch.is_tensor(v) and v.dtype == torch.uint8]
        out[f"zero {stage}"] = {"apart": float((ends[0] - ends[1]).norm() / ends[0].norm()),
                                "num_bytes": sum(bytes_held)}
    return out


def adapted_model() -> torch.nn.Module:
    """bfloat16, with an adapter that is a small part of it and says something."""
    model = tiny_causal_lm().bfloat16()
    add_lora(model, LoraConfig(r=1, target_modules=["q_proj", "down_proj"]))
    for name, weight in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(weight, std=0.1)
    return model


def masters_of(engine: HybridEngine) -> dict:
    return {k.removeprefix("model."): v for k, v in engine.training.state()["weights"].items()}


def masters_by_hand(begun: dict) -> tuple[dict, dict, list[float]]:
    """Before, after, and norms: the whole batch's gradient in bf16, torch's AdamW on fp32 masters from `begun` on, each
    of which rounds to its weight."""
    model = adapted_model()
    own = {n: torch.nn.Parameter(begun[n]) for n, p in model.named_parameters() if p.requires_grad}
    assert all(torch.equal(own[n].bfloat16(), model.get_parameter(n)) for n in own)
    before = {n: p.detach().clone() for n, p in own.items()}
    optimizer, norms = torch.optim.AdamW(own.values(), lr=RATE, weight_decay=0.0, eps=EPSILON), []
    for step in range(STEPS):
        model.zero_grad()
        plain_loss(model, rows_of(step)[1]).backward()
        for name, parameter in own.items():
            parameter.grad = model.get_parameter(name).grad.float()
        norms.append(float(torch.nn.utils.clip_grad_norm_(own.values(), BOUND)))
        optimizer.step()
        with torch.no_grad():
            for name, parameter in own.items():
                model.get_parameter(name).copy_(parameter)
    return before, {n: p.detach() for n, p in own.items()}, norms


def masks() -> dict:
    """The same weights everywhere, other dropout masks on each process."""
    builders.seed_everything(3)
    weight = torch.randn(4)
    builders.seed_dropout(3)
    return {"weight": weight.tolist(), "mask": torch.nn.functional.dropout(torch.ones(64), 0.5).tolist()}
