"""What two processes find out together; two_processes.py starts them once, by torchrun, and judges the numbers.

Every check trains or samples here, compares with plain torch or transformers on one process's whole batch, and returns
what it measured. The first process writes all of it to the file it is given.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from hybrid_rlhf.algorithms.preference import bradley_terry
from hybrid_rlhf.cli import main
from hybrid_rlhf.core import failure
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import consecutive_ranks, gather_over_ranks, rank, sum_over_ranks
from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, SamplingConfig, ZeroConfig
from hybrid_rlhf.engine.train.zero import gathered
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.report import summary
from hybrid_rlhf.roles import Actor, PolicyModule, Reward, policy_module
from tests.distributed.rank_adapters import check_adapters
from tests.distributed.rank_experts import check_experts
from tests.distributed.rank_rows import STEPS, moved, own_rows, plain_loss, relative, rows_of, tokens_allowed
from tests.distributed.rank_teachers import check_teachers
from tests.factories.shortage import failing
from tests.factories.tiny import tiny_causal_lm, tiny_scalar_model, tiny_tokenizer

RATE = 0.5
KINDS = (0, 1, 3)  # stages 1 and 2 are one optimizer of DeepSpeed's
LAYOUTS = {
    "zero 1, optimizer offloaded": {"zero_stage": 1, "offload": ["optimizer"]},
    "zero 2, all activations offloaded": {"zero_stage": 2, "offload": ["optimizer", "activations"]},
    "zero 3, all offloaded": {"zero_stage": 3, "offload": ["optimizer", "parameters", "activations"]}}


@contextmanager
def patched(where: object, name: str, value: object) -> Iterator[None]:
    before = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, before)


def optimizer_of(optim: str, max_grad_norm: float) -> OptimizerConfig:
    return OptimizerConfig(learning_rate=RATE if optim == "sgd" else 1e-2, max_grad_norm=max_grad_norm, optim=optim)


def plain_run(optim: str, max_grad_norm: float) -> dict:
    """The same steps by torch alone on the whole batch: losses, norms, weights before and after."""
    model = tiny_causal_lm().train()
    before = copy.deepcopy(model.state_dict())
    kind = torch.optim.SGD if optim == "sgd" else torch.optim.AdamW
    extra = {} if optim == "sgd" else {"weight_decay": 0.0}
    optimizer = kind(model.parameters(), lr=RATE if optim == "sgd" else 1e-2, **extra)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = plain_loss(model, rows_of(step)[1])
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)))
        optimizer.step()
        losses.append(float(loss))
    return {"losses": losses, "norms": norms, "before": before, "after": model.state_dict(), "model": model}


def trained(optim: str, max_grad_norm: float, checkpointing: bool = False, tp: int = 1, full_at: int | None = None,
            dtype: torch.dtype = torch.float32, **layout: object) -> tuple[Actor, dict]:
    model = tiny_causal_lm().to(dtype)
    if full_at:  # more tokens than that do not fit, which shows in the midst of the backward pass
        model.model.layers[0].register_forward_hook(failing("backward", lambda tokens: tokens > full_at))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = HybridEngine(PolicyModule(model), model, eos_ids=[3], tp=consecutive_ranks(tp))
    engine.prepare_training(optimizer_of(optim, max_grad_norm), lambda step: 1.0, ZeroConfig(**layout))
    actor = Actor(engine, tiny_tokenizer(), tokens_allowed())
    losses, norms = [], []
    for step in range(STEPS):
        metrics = actor.fit_tokens(
            rows_of(step)[0].rows(own_rows(step)),
            lambda tokens, count: (-tokens.logprobs.sum() / count,
                                   {"loss": (-tokens.logprobs.detach().mean(), tokens.logprobs.numel())}))
        found = metrics.over_ranks().compute()
        losses.append(found["loss"])
        norms.append(found["grad_norm"])
    return actor, {"losses": losses, "norms": norms}


def compare(actor: Actor, found: dict, plain: dict) -> dict:
    """Relative differences: of losses, of gradient norms, of the weights' whole way, and of its length."""
    with gathered(actor.engine.module):
        after = {k: v.clone() for k, v in actor.engine.model.state_dict().items()}
    ours, theirs = (moved(w, plain["before"]) for w in (after, plain["after"]))
    return {"loss": relative(found["losses"], plain["losses"]), "norm": relative(found["norms"], plain["norms"]),
            "weights": float((ours - theirs).norm() / theirs.norm()),
            "length": abs(float(ours.norm() / theirs.norm()) - 1), "norms": found["norms"]}


def check_layouts() -> dict:
    plain, clipped, adam = plain_run("sgd", 1e9), plain_run("sgd", 0.5), plain_run("adamw", 0.5)
    out = {name: compare(*trained("sgd", 1e9, **layout), plain) for name, layout in LAYOUTS.items()}
    with patched(policy_module, "chunk_rows", lambda *_: 5):
        out["zero 3, logits in chunks"] = compare(*trained("sgd", 1e9, zero_stage=3), plain)
    for stage in range(4):
        out[f"zero {stage}"] = compare(*trained("sgd", 0.5, zero_stage=stage), clipped)
    for stage in KINDS:
        out[f"zero {stage}, checkpointing"] = compare(*trained("sgd", 1e9, checkpointing=True, zero_stage=stage), plain)
        out[f"zero {stage}, adamw"] = compare(*trained("adamw", 0.5, zero_stage=stage), adam)
    for stage in KINDS[1:]:
        out[f"zero {stage}, bfloat16"] = compare_masters(
            *trained("sgd", 1e9, dtype=torch.bfloat16, zero_stage=stage), plain)
    return out


def end_short_of_memory() -> None:
    """Last of all: the second process has no room for a single row, in a pass in which the first waits for it."""
    try:
        trained("sgd", 1e9, full_at=5 if rank() == 1 else None, zero_stage=3)
    except UserError as error:
        failure.fail(2, f"error: {error}")


def compare_masters(actor: Actor, found: dict, plain: dict) -> dict:
    """As `compare`, of 16-bit weights' fp32 masters, which moved from the rounded start."""
    masters = {k.removeprefix("model."): v for k, v in actor.engine.training.state()["weights"].items()}
    ours = moved(masters, {k: plain["before"][k].bfloat16() for k in masters})
    theirs = moved(plain["after"], {k: plain["before"][k] for k in masters})
    return {"loss": relative(found["losses"], plain["losses"]),
            "weights": float((ours - theirs).norm() / theirs.norm()),
            "dtypes": sorted({str(v.dtype) for v in masters.values()})}


def check_inference() -> dict:
    """ZeRO 3: the first process has four prompts and the second one none; then training goes on."""
    plain = plain_run("sgd", 1e9)
    actor, _ = trained("sgd", 1e9, zero_stage=3)
    engine = actor.engine
    prompts = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14], [15]] if rank() == 0 else []
    sampling = SamplingConfig(max_new_tokens=12, temperature=0)
    states = []
    for _ in range(2):
        with gathered(engine.module):
            states.append({k: v.clone() for k, v in engine.model.state_dict().items()})
        before = sum(p.numel() for p in engine.module.parameters())
        with engine.inference():
            inside = sum(p.numel() for p in engine.module.parameters())
            tokens = engine.generate(prompts, sampling).tokens
        after = sum(p.numel() for p in engine.module.parameters())
    oracle = [plain["model"].eval().generate(torch.tensor([p]), do_sample=False, max_new_tokens=12)[0, len(p):].tolist()
              for p in prompts]
    actor.fit_tokens(rows_of(0)[0].rows(own_rows(0)), lambda t, count: (-t.logprobs.sum() / count, {}))
    return {"tokens": tokens, "oracle": oracle, "path": engine.describe()["path"],
            "held": [before, inside, after], "is_same": all(torch.equal(states[0][k], states[1][k]) for k in states[0])}


def check_shards() -> dict:
    """ZeRO 3 and TP 2: four prompts and none, drawn by both processes from the halves that each keeps."""
    plain = plain_run("sgd", 1e9)
    actor, _ = trained("sgd", 1e9, zero_stage=3, tp=2)
    engine, prompts = actor.engine, [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14], [15]]
    oracle = [plain["model"].eval().generate(torch.tensor([p]), do_sample=False, max_new_tokens=12)[0, len(p):].tolist()
              for p in prompts]
    weights = dict(engine.module.named_parameters())
    tokens, inside = [], []
    for _ in range(2):
        with engine.inference():
            inside.append(sum(p.numel() for p in engine.module.parameters()))
            tokens.append(engine.generate([] if rank() else prompts, SamplingConfig(12, temperature=0)).tokens)
    after = dict(engine.module.named_parameters())
    with gathered(engine.module):
        state = engine.model.state_dict()
        off = max(float((state[k] - v).abs().max()) for k, v in plain["after"].items())
    actor.fit_tokens(rows_of(0)[0].rows(own_rows(0)), lambda t, count: (-t.logprobs.sum() / count, {}))
    whole = {n: p.numel() for n, p in plain["model"].named_parameters()}
    halved = [n for n in whole if "proj" in n or "lm_head" in n]
    return {"tokens": tokens, "oracle": oracle, "said": engine.describe(), "inside": inside, "off": off,
            "expected": sum(whole.values()) - sum(whole[n] for n in halved) // 2,
            "is_restored": all(after[n] is p for n, p in weights.items()),
            "held": sum(p.numel() for p in after.values())}


def check_state() -> dict:
    """What a checkpoint holds under ZeRO 3 after Adam's steps is what torch's optimizer holds."""
    actor, _ = trained("adamw", 0.5, zero_stage=3)
    plain, state = plain_run("adamw", 0.5), actor.engine.training.state()
    ours = {k.removeprefix("model."): v for k, v in state["weights"].items()}
    theirs = dict(plain["model"].named_parameters())
    return {"missing": sorted(set(theirs) ^ set(ours)), "shapes": all(ours[k].shape == theirs[k].shape for k in theirs),
            "moments": all(state["exp_avg"][k].shape == state["weights"][k].shape for k in state["weights"])}


def check_rewards() -> dict:
    """Pairs on a scalar model under ZeRO 3, three on the first process and five on the second, against plain torch."""
    model, twin = tiny_scalar_model(), tiny_scalar_model()
    before = copy.deepcopy(twin.state_dict())
    engine = HybridEngine(ScalarModel(model))
    engine.prepare_training(optimizer_of("sgd", 1e9), lambda step: 1.0, ZeroConfig(3))
    reward = Reward(engine, tokens_allowed())
    chosen, rejected = rows_of(0)[1], rows_of(1)[1]
    mine = slice(0, 3) if rank() == 0 else slice(3, 8)
    lists = chosen[mine] + rejected[mine]
    size = len(lists) // 2
    mask = length_mask(torch.tensor([len(r) for r in lists]))
    pairs = torch.stack([torch.arange(size), torch.arange(size) + size], 1)
    count = sum_over_ranks(torch.tensor(float(size)))
    reward.update(SequenceBatch(pad_right(lists, 0), mask, mask), pairs,
                  lambda c, r, _: (bradley_terry(c, r, torch.zeros(len(c)), 0.0).sum() / count, {}))
    score = torch.stack([twin(input_ids=torch.tensor([row])).logits[0, 0] for row in chosen + rejected])
    (-torch.nn.functional.logsigmoid(score[:8] - score[8:]).mean()).backward()
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.grad is not None:
                parameter -= RATE * parameter.grad
    with gathered(model):
        ours = moved(model.state_dict(), before)
    theirs = moved(twin.state_dict(), before)
    return {"weights": float((ours - theirs).norm() / theirs.norm())}


def check_stages(argv_of: dict[str, list[str]]) -> dict:
    return {name: main(argv) for name, argv in argv_of.items()}


def run(out: Path, stages: Path) -> None:
    failure.join()
    summary.draw = lambda _history, _folder: []  # as in conftest.py: half of a tiny run's time
    results, seconds = {}, {}
    checks = {"layouts": check_layouts, "experts": check_experts, "adapters": check_adapters,
              "inference": check_inference, "shards": check_shards, "state": check_state, "rewards": check_rewards,
              "teachers": check_teachers, "stages": lambda: check_stages(json.loads(stages.read_text()))}
    for name, check in checks.items():
        start = time.perf_counter()
        results[name] = gather_over_ranks(check())
        seconds[name] = time.perf_counter() - start
    if rank() == 0:
        out.write_text(json.dumps(results | {"seconds": seconds}, indent=1))
    end_short_of_memory()


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]))
