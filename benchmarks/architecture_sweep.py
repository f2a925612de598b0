"""Every causal-LM type of the installed transformers on the decode engine, at tiny size, with a negative control.

    python benchmarks/architecture_sweep.py [--json FILE] [--page FILE] [--against FILE] [--only TYPE ...]
                                            [--limit SECONDS]

Each type is built with random weights and examined in a process of its own: five ragged prompts in groups of two share
three slots, greedy, in fp32. Compared are the logits of every draw with the model's plain forward over the whole
sequence, and the tokens with transformers' generate, one prompt at a time. Then the same model is given to the engine
with one thing broken at a time, which its load-time probe has to notice. At last it trains: loss and gradient of the
prompts by the policy's module (states of the backbone, the head in chunks) are compared with those of its own forward.
Exit code 1 if a type that the engine takes is wrong, or fails in any other way than by a refusal, or comes out worse
than the rows of an earlier --json say.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

import torch
from harness import first_lines, parse, parser_of, run_forked, table_of, write_rows, write_tables
from tiny_configs import PROMPTS, all_types, tiny_model, versions
from torch import Tensor, nn

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right
from hybrid_rlhf.engine.decode import runner as runner_module
from hybrid_rlhf.engine.decode.attention import SlotAttention
from hybrid_rlhf.engine.decode.kv_cache import StateRows
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.engine.decode.scheduler import stream
from hybrid_rlhf.engine.hybrid import HybridEngine
from hybrid_rlhf.kernels import REFERENCE, cpu, ops_for
from hybrid_rlhf.kernels.gradients import causal_attention_by
from hybrid_rlhf.kernels.ops import Ops
from hybrid_rlhf.models.backbone import check_head
from hybrid_rlhf.models.dropout import disable_dropout
from hybrid_rlhf.roles.policy_module import PolicyModule

GROUP = 2
GREEDY = SamplingConfig(max_new_tokens=8, temperature=0)
PATHS = ("native", "eager", "generate", "refused", "failed")  # the best first
TOKENS = ("generate", "generate only", "plain forward", "neither")
BOUND = 1e-4  # of a relative difference of logits in fp32; a wrong mask gives 1e-2 and more
EOS, SLOTS, MEMORY = 2, 3, 8 << 30


@dataclass
class Row:
    """One type. difference: largest of |engine - plain forward| over the spread of the true logits. tokens: what the
    greedy tokens equal. layers: decoder layers that decode steps pass through in one call. control: fault -> whether
    the probe noticed it. trains: yes, the line that refuses it, or what is wrong. gradient: |ours - plain torch's| over
    |plain torch's| of all weights together.
    """

    type: str
    path: str = "refused"
    reason: str = ""
    difference: float | None = None
    tokens: str = ""
    layers: int = 0
    cache_bytes: int | None = None
    control: dict[str, bool] = field(default_factory=dict)
    trains: str = ""
    gradient: float | None = None
    seconds: float = 0.0

    @property
    def is_on_slots(self) -> bool:
        return self.path in ("native", "eager")

    @property
    def is_wrong(self) -> bool:
        runs = self.path in ("native", "eager", "generate")
        return (self.path == "failed" or self.trains.startswith("wrong") or (
            runs and (self.tokens == "neither" or not self.difference < BOUND)))


def worse(row: Row, before: Row) -> list[str]:
    """In what a type comes out worse than before, one line each. A difference under the bound is rounding."""
    lost = [fault for fault, was_seen in before.control.items() if was_seen and not row.control.get(fault)]
    reasons = [
        (row.is_wrong and not before.is_wrong, f"wrong: difference {row.difference}, tokens {row.tokens}"),
        (PATHS.index(row.path) > PATHS.index(before.path), f"path {before.path} -> {row.path}: {row.reason}"),
        (before.tokens and _place(row) > _place(before), f"tokens equal {before.tokens} -> {row.tokens}"),
        (row.layers < before.layers, f"whole layers {before.layers} -> {row.layers}"),
        (before.trains == "yes" != row.trains, f"trained before: {row.trains}"),
        (row.is_on_slots and lost, f"no longer noticed when broken: {', '.join(lost)}"),
    ]
    return [reason for is_so, reason in reasons if is_so]


def _place(row: Row) -> int:
    """Of what its tokens equal among TOKENS; the first where it gives none, which its path says already."""
    return TOKENS.index(row.tokens.split(" (")[0]) if row.tokens else -1


def read_rows(path: Path) -> dict[str, Row]:
    """The rows that an earlier run wrote with --json, by type."""
    return {row["type"]: Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))}


# -- what is broken on purpose, for the probe to notice ----------------------------------------------------------------


@contextmanager
def hidden_column(_model: nn.Module) -> Iterator[None]:
    """The mask hides the second token of every sequence from all later ones."""
    true_mask = SlotAttention.bool_mask

    def narrow(self: SlotAttention, **named: object) -> Tensor:
        seen = true_mask(self, **named)
        positions = self.cache.step.positions[:, None, :, None]
        return seen & ~((torch.arange(seen.shape[-1]) == 1) & (positions > 1))

    with mock.patch.object(SlotAttention, "bool_mask", narrow), \
            mock.patch.object(SlotAttention, "mask", lambda self, **named: narrow(self, **named)):
        yield


@contextmanager
def doubled_positions(model: nn.Module) -> Iterator[None]:
    """Token i is told that it stands at 2 i. (A shift of all by the same would be right for relative positions.)"""

    def double(_module: nn.Module, inputs: tuple, named: dict) -> tuple[tuple, dict]:
        if isinstance(named.get("position_ids"), Tensor):  # the plain forward is given none
            named = named | {"position_ids": named["position_ids"] * 2}
        return inputs, named

    hook = model.base_model.register_forward_pre_hook(double, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def exchanged_states(_model: nn.Module) -> Iterator[None]:
    """Before every decode step each slot gets the state of its neighbour."""
    begin = StateRows.begin

    def exchange(self: StateRows, is_prefill: bool) -> None:
        if not is_prefill:
            for state in StateRows.tensors(self):
                state.copy_(state.roll(1, 0))
        begin(self, is_prefill)

    with mock.patch.object(StateRows, "begin", exchange):
        yield


FAULTS: dict[str, Callable] = {"mask": hidden_column, "positions": doubled_positions, "states": exchanged_states}


# -- one type ----------------------------------------------------------------------------------------------------------


def examine(name: str) -> Row:
    row = Row(name)
    try:
        model = tiny_model(name)
    except Exception as error:
        row.reason = f"not built: {first_lines(error)}"
        return row
    runner_module.ops_for = lambda _device: every_kernel()
    engine = HybridEngine(model, model, eos_ids=[EOS], max_batch=SLOTS)
    requests = [p for p in PROMPTS for _ in range(GROUP)]
    logits: dict[tuple[int, int], Tensor] = {}
    try:
        with engine.inference():
            listen(engine, logits, len(requests))
            drawn = engine.generate(requests, GREEDY).tokens
    except UserError as error:
        row.reason = str(error)
        train(row, model)
        return row
    about = engine.describe()
    row.path, row.cache_bytes, row.layers = about["path"], about["kv_bytes"], about["fused"].get("decode_layer", 0)
    row.reason = "; ".join(f"{path}: {why}" for path, why in about["refused"].items())
    compare(row, model, requests, drawn, logits)
    if row.is_on_slots:
        row.control = {fault: is_noticed(model, break_it) for fault, break_it in FAULTS.items()}
    train(row, model)
    return row


def every_kernel() -> Ops:
    """The processor's kernels with none left out because torch is faster on this one: a type that is right here is
    right on every processor."""
    ops = ops_for("cpu")
    return ops if ops.decode_attention is REFERENCE.decode_attention else ops._replace(
        linear=cpu.module().linear, linear_dtypes=frozenset((torch.float32, torch.bfloat16)),
        decode_layer=cpu.module().DecodeLayer, causal_attention=causal_attention_by(cpu.module()))


def listen(engine: HybridEngine, logits: dict[tuple[int, int], Tensor], count: int) -> None:
    """Have the engine's sampler note the logits of every draw: (request, tokens drawn before) -> (V,)."""
    runner, numbers = engine._runner, {stream(0, n): n for n in range(count)}
    draw = runner.ops.sample

    def sample(scores: Tensor, streams: Tensor, positions: Tensor, **settings: object) -> tuple[Tensor, Tensor]:
        for values, key, position in zip(scores, streams.tolist(), positions.tolist(), strict=True):
            if key in numbers:
                logits.setdefault((numbers[key], position), values.float().clone())
        return draw(scores, streams, positions, **settings)

    runner.ops = runner.ops._replace(sample=sample)


@torch.no_grad()
def compare(row: Row, model: nn.Module, requests: list[list[int]], drawn: list[list[int]],
            logits: dict[tuple[int, int], Tensor]) -> None:
    """Fill in the difference and what the tokens equal."""
    worst, is_plain = 0.0, True
    for number, (prompt, tokens) in enumerate(zip(requests, drawn, strict=True)):
        ours = torch.stack([logits[number, i] for i in range(len(tokens))])
        truth = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        spread = (truth - truth.mean(-1, keepdim=True)).abs().max()
        worst = max(worst, float(((ours - truth).abs().max() / spread).nan_to_num(float("inf"))))
        chosen = truth.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        is_plain &= bool((chosen >= truth.max(-1).values - BOUND * spread).all())
    row.difference = worst
    expected = generated(model)
    if isinstance(expected, str):
        row.tokens = f"plain forward ({expected})" if is_plain else "neither"
    elif drawn == [tokens for tokens in expected for _ in range(GROUP)]:
        row.tokens = "generate" if is_plain else "generate only"
    else:
        row.tokens = "plain forward" if is_plain else "neither"


def generated(model: nn.Module) -> list[list[int]] | str:
    """transformers' greedy tokens for each prompt alone, or why there are none. The model's own settings for it go."""
    model.generation_config = type(model.generation_config)()  # some would force an end or suppress tokens
    try:
        return [model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p), dtype=torch.long),
                               do_sample=False, max_new_tokens=GREEDY.max_new_tokens, eos_token_id=EOS,
                               pad_token_id=0)[0, len(p):].tolist() for p in PROMPTS]
    except Exception as error:
        return f"generate raises {first_lines(error)}"


def is_noticed(model: nn.Module, break_it: Callable) -> bool:
    """Whether the engine's probe keeps a broken model off the slots."""
    engine = HybridEngine(model, model, eos_ids=[EOS])
    with break_it(model):
        try:
            with engine.inference():
                return engine.describe()["path"] == "generate"
        except UserError:
            return True


# -- its training ------------------------------------------------------------------------------------------------------


def train(row: Row, model: nn.Module) -> None:
    """Fill in whether one step of the product's training takes the gradient that plain torch does."""
    rows = [p for p in PROMPTS if len(p) > 1]
    mask = length_mask([len(p) for p in rows])
    batch = SequenceBatch(pad_right(rows, 0), mask, mask)
    disable_dropout(model)
    model.train()
    try:
        check_head(model)
        module = PolicyModule(model)
        module.can_share()
        ours = gradient_of(model, lambda: -module(batch).logprobs.mean())
    except UserError as error:
        row.trains = f"refused: {error}"
        return
    except Exception as error:
        row.trains = f"wrong: {first_lines(error)}"
        return
    plain = gradient_of(model, lambda: plain_loss(model, rows))
    row.gradient = float((ours[1] - plain[1]).norm() / plain[1].norm())
    is_same = abs(ours[0] - plain[0]) < BOUND * abs(plain[0]) and row.gradient < BOUND
    row.trains = "yes" if is_same else f"wrong: loss {ours[0]:.6g}, of plain torch {plain[0]:.6g}"


def gradient_of(model: nn.Module, loss_of: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """The loss, and the gradient of all parameters in one row (zeros for those that it does not reach)."""
    model.zero_grad()
    loss = loss_of()
    loss.backward()
    return float(loss.detach()), torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.float().flatten()
                                   for p in model.parameters()])


def plain_loss(model: nn.Module, rows: list[list[int]]) -> Tensor:
    """Each row by itself through the model's own forward: no padding, no chunks."""
    losses = [nn.functional.cross_entropy(model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1].float(),
                                          torch.tensor(row[1:]), reduction="sum") for row in rows]
    return torch.stack(losses).sum() / sum(len(row) - 1 for row in rows)


# -- all of them -------------------------------------------------------------------------------------------------------


def examine_within_memory(name: str) -> Row:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    return examine(name)


def counts(rows: list[Row]) -> dict[str, int]:
    paths, slots = Counter(row.path for row in rows), [row for row in rows if row.is_on_slots]
    return {"rows": len(rows), **{path: paths[path] for path in PATHS},
            "types_on_slots": len({row.type.split(":")[0] for row in slots}), "wrong": sum(r.is_wrong for r in rows),
            "trains": sum(row.trains == "yes" for row in rows),
            "whole_layers": sum(row.layers > 0 for row in rows),
            "equal_to_generate": sum(row.tokens == "generate" for row in slots),
            "control_noticed": sum(any(row.control.values()) for row in slots),
            **{f"control_{fault}": sum(row.control[fault] for row in slots) for fault in FAULTS}}


def tables_of(rows: list[Row]) -> list[str]:
    """What they come to, and the types."""
    about = versions() | {"kernels": ops_for("cpu").name} | counts(rows)
    columns = ("type", "path", "difference", "greedy tokens equal", "whole layers", "cache bytes", "control", "trains",
               "reason")
    return [table_of(("of all types", ""), about.items()), table_of(columns, [(
        row.type, row.path, None if row.difference is None else f"{row.difference:.1e}", row.tokens, row.layers or None,
        row.cache_bytes or None, ", ".join(f for f, is_seen in row.control.items() if is_seen) or (
            "none" if row.control else None), row.trains, row.reason) for row in rows])]


def sweep(types: list[str], limit: float) -> Iterator[Row]:
    for name in types:
        start = time.perf_counter()
        row, fault = run_forked(examine_within_memory, name, limit=limit)
        row = row or Row(name, "failed", fault)
        row.seconds = round(time.perf_counter() - start, 2)
        print(f"{name}: {row.path} {row.difference} {row.tokens} {row.reason} trains: {row.trains} {row.gradient}",
              file=sys.stderr)
        yield row


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    parser.add_argument("--against", type=Path, help="rows of an earlier run; a type that comes out worse is named")
    parser.add_argument("--only", nargs="*", help="types (default: all)")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one type")
    options = parse(parser, argv)
    torch.set_num_threads(1)  # a fork inherits no thread pool
    import transformers

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    ops_for("cpu")  # compiled once, before the forks
    earlier = read_rows(options.against) if options.against else {}  # before --json may write over it
    types = options.only or (["llama", "bloom", "mamba"] if options.quick else all_types())
    rows = [Row(**row) for row in write_rows((asdict(row) for row in sweep(types, options.limit)), options.json)]
    print(*(f"{name} {count}" for name, count in counts(rows).items()), sep=", ")
    if options.page:
        write_tables(options.page, *tables_of(rows))
    for row in rows:
        if row.is_wrong:
            print(f"wrong: {row.type} ({row.path}): {row.difference} {row.tokens} {row.reason} {row.trains}")
    losses = [(row.type, loss) for row in rows if row.type in earlier for loss in worse(row, earlier[row.type])]
    for name, loss in losses:
        print(f"worse than before: {name}: {loss}")
    return int(bool(losses) or any(row.is_wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
