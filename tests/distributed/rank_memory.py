"""What two processes make of memory that runs out on one of them; test_memory_together.py starts them, by torchrun.

Each check trains or scores with one process short of memory, and compares with plain torch on the whole batch. The
first process writes what was found to the file that it is given.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from hybrid_rlhf.core import failure
from hybrid_rlhf.core.distributed import gather_over_ranks, rank
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engine.train.zero import gathered
from hybrid_rlhf.roles import Actor, PolicyModule
from hybrid_rlhf.roles.scoring import per_sequence
from tests.distributed.rank_rows import STEPS, moved, own_rows, plain_loss, relative, rows_of
from tests.factories.shortage import failing, out_of_memory
from tests.factories.tiny import tiny_causal_lm, tiny_tokenizer

RATE, LIMIT = 0.5, 34


class Case(NamedTuple):
    """What is lacking, on which layout, at which stages of ZeRO."""

    lacking: dict
    layout: Mapping[str, object] = MappingProxyType({})
    max_tokens: int = 400
    stages: tuple[int, ...] = (0, 1, 2, 3)


class Shortage:
    """The process `short` runs out of memory `where`, in passes of more than `limit` tokens, from the step `since` on
    and after as many such passes as `lets`."""

    def __init__(self, where: str = "backward", short: int = 1, since: int = 0, layer: int = 0, lets: int = 0,
                 limit: int = LIMIT) -> None:
        self.where, self.short, self.since, self.layer, self.lets = where, short, since, layer, lets
        self.limit, self.step, self.times = limit, -1, 0

    def is_full(self, tokens: int) -> bool:
        if rank() != self.short or self.step < self.since or tokens <= self.limit:
            return False
        self.lets -= 1
        self.times += self.lets < 0
        return self.lets < 0


def plain_run() -> dict:
    """The steps by torch alone on the whole batch."""
    model = tiny_causal_lm().train()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = plain_loss(model, rows_of(step)[1])
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        losses.append(float(loss))
    return {"losses": losses, "norms": norms, "before": before, "after": model.state_dict()}


def plain_sum(model: torch.nn.Module, row: list[int]) -> torch.Tensor:
    """The negative log-likelihood of a row's last half."""
    start = len(row) // 2
    logits = model(input_ids=torch.tensor([row])).logits[0, start - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(row[start:]), reduction="sum")


def engine_of(stage: int, shortage: Shortage | None, checkpointing: bool = False, offload: tuple[str, ...] = (),
              bucket: int | None = None, is_frozen: bool = False) -> HybridEngine:
    model = tiny_causal_lm()
    if shortage:
        model.model.layers[shortage.layer].register_forward_hook(failing(shortage.where, shortage.is_full))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = HybridEngine(PolicyModule(model), model, eos_ids=[3], name="actor")
    if is_frozen:
        return engine.prepare_frozen(ZeroConfig(3))
    engine.prepare_training(OptimizerConfig(learning_rate=RATE, max_grad_norm=1e9, optim="sgd"), lambda step: 1.0,
                            ZeroConfig(stage, list(offload)))
    if bucket:  # else all gradients of so small a model are added up at once
        engine.training.engine.optimizer.reduce_bucket_size = bucket
    return engine


def trained(stage: int, shortage: Shortage | None, max_tokens: int, scores_first: bool = False,
            **layout: object) -> dict:
    engine = engine_of(stage, shortage, **layout)
    if scores_first:  # by which ZeRO 3 takes the order of layers for that of a forward pass alone
        per_sequence(engine, rows_of(0)[0].rows(own_rows(0)), 400)
    return fitted(engine, shortage, max_tokens)


def fitted(engine: HybridEngine, shortage: Shortage | None, max_tokens: int) -> dict:
    actor = Actor(engine, tiny_tokenizer(), max_tokens)
    losses, norms, budgets = [], [], []
    for step in range(STEPS):
        if shortage:
            shortage.step = step
        found = stepped(actor, step)
        budgets.append(found["own_budget"])
        losses.append(found["loss"])
        norms.append(found["grad_norm"])
    with gathered(engine.module):
        after = {k: v.clone() for k, v in engine.model.state_dict().items()}
    return {"losses": losses, "norms": norms, "after": after, "learnt": engine.oom_limits.get("update"),
            "budgets": budgets, "times": shortage.times if shortage else 0}


def stepped(actor: Actor, step: int) -> dict:
    """The metrics of one step, over the processes, and this one's budget."""
    metrics = actor.fit_tokens(
        rows_of(step)[0].rows(own_rows(step)),
        lambda tokens, count: (-tokens.logprobs.sum() / count,
                               {"loss": (-tokens.logprobs.detach().mean(), tokens.logprobs.numel())}))
    own_budget = metrics.compute()["micro_batch_tokens"]
    return metrics.over_ranks().compute() | {"own_budget": own_budget}


def apart(found: dict, expected: dict, before: dict) -> dict:
    ours, theirs = (moved(each["after"], before) for each in (found, expected))
    return {"weights": float((ours - theirs).norm() / theirs.norm()),
            "loss": relative(found["losses"], expected["losses"]),
            "norm": relative(found["norms"], expected["norms"])}


UPDATES = {  # stages 1 and 2 are one optimizer of DeepSpeed's: by turns
    "forward, first pass": Case({"where": "forward"}, stages=(0, 3)),
    "backward, first pass": Case({}),
    "backward, first process, later step": Case({"short": 0, "since": 1}, stages=(2, 3)),
    "forward, last layer, later step": Case({"where": "forward", "since": 2, "layer": 1}, stages=(1, 3)),
    "backward, second pass of a step": Case({"lets": 1, "limit": 20}, max_tokens=40, stages=(0, 3)),
    "backward, checkpointing": Case({}, {"checkpointing": True}, stages=(1, 3)),
    "backward, all offloaded": Case({}, {"offload": ("optimizer", "parameters")}, stages=(3,)),
    "backward, optimizer offloaded": Case({"since": 1}, {"offload": ("optimizer",)}, stages=(2,)),
    "after scoring": Case({}, {"scores_first": True}, stages=(3,)),
}


def check_updates(stage: int) -> dict:
    plain, out = plain_run(), {}
    for name, case in UPDATES.items():
        if stage not in case.stages:
            continue
        layout = {**case.layout} | ({"bucket": 3000} if stage in (1, 2) else {})
        shortage = Shortage(**case.lacking)
        found = trained(stage, shortage, case.max_tokens, **layout)
        out[name] = {"plain": apart(found, plain, plain["before"]),
                     **{key: found[key] for key in ("learnt", "budgets", "times")}}
    return out


def check_sums() -> dict:
    """Memory runs out between the sums over processes that end a step: one has been made, the next has not."""
    plain, out = plain_run(), {}
    for stage in (0, 1, 2):
        engine = engine_of(stage, None, bucket=3000 if stage else None)
        if stage == 0:
            engine.training.engine.allreduce_gradients = partial(engine.training.engine.allreduce_gradients, 3000)
        owner, name = ((engine.training.engine, "allreduce_bucket") if stage == 0 else
                       (engine.training.engine.optimizer, "average_tensor"))
        calls, add_up = [], getattr(owner, name)

        def short(*inputs: object, calls: list = calls, add_up: Callable = add_up, **named: object) -> object:
            calls.append(1)
            if rank() == 1 and len(calls) == 2:
                raise out_of_memory()
            return add_up(*inputs, **named)

        setattr(owner, name, short)
        found = fitted(engine, None, 400)
        out[str(stage)] = apart(found, plain, plain["before"]) | {"learnt": found["learnt"], "calls": len(calls)}
    return out


def check_scores() -> dict:
    """Under ZeRO 3: log-probabilities by a model in training (before its first step and after one) and by one that is
    never trained, of unlike numbers of rows."""
    plain, out = plain_run(), {}
    twin = tiny_causal_lm().eval()
    for name in ("trained", "frozen"):
        for where, lacking, max_tokens in (("first pass", {}, 400), ("second pass", {"lets": 1, "limit": 20}, 40)):
            shortage = Shortage("forward", since=-1, **lacking)
            engine = engine_of(3, shortage, is_frozen=name == "frozen")
            found, expected = [], []
            for step in range(STEPS):
                batch = rows_of(step)[0].rows(own_rows(step))
                with torch.no_grad():
                    found += per_sequence(engine, batch, max_tokens).tolist()
                    expected += [float(-plain_sum(twin, row)) for row in
                                 (rows_of(step)[1][i] for i in own_rows(step).tolist())]
            out[f"{name}, {where}"] = {"apart": relative(found, expected), "times": shortage.times,
                                       "learnt": engine.oom_limits.get("score")}
            if name == "trained":  # training goes on from what scoring has left
                out[f"{name}, {where}"] |= apart(fitted(engine, None, 400), plain, plain["before"])
    return out


CHECKS = {**{f"zero {stage}": partial(check_updates, stage) for stage in range(4)}, "sums": check_sums,
          "scores": check_scores}


def run(out: Path, *names: str) -> None:
    failure.join()
    results = {name: gather_over_ranks(CHECKS[name]()) for name in names or CHECKS}
    if rank() == 0:
        out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    run(Path(sys.argv[1]), *sys.argv[2:])
