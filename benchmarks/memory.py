"""Peak resident memory over the idle interpreter, each case in a process of its own, beside what it must hold.

    python benchmarks/memory.py [--cases generation ppo shared full] [--json FILE]

A Llama-shaped 134M base in bf16, 16 x (128 + 64) tokens, micro-batches of 384 tokens (two sequences), LoRA rank 16.
"Idle" is the process with all libraries loaded, after a PPO step of a tiny model.

generation  our decode engine against one copy of the weights and the KV cache; what five mode switches leave behind
ppo         four roles on one base against base + KV cache + the measured peak of one micro-batch's activations
shared      four bf16 models with LoRA actor and critic (peer) over one shared base (ours)
full        four models, actor and critic fully fine-tuned (peer), over one shared base (ours)

Under each case stands the peak of each role and phase (memory/{role}/{phase} of the second step), what --plan predicts,
and by how much it is off. The C library's allocator gives freed blocks back, as `train.py --memory` makes it.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from harness import Case, memory_status, parse, parser_of, row_of, run_apart, sizes_of, write_rows
from random_models import LORA, make_folders, policy_config, prompts_of, roles_of, trainer_of

from hybrid_rlhf.core.memory import give_back_freed_blocks
from hybrid_rlhf.engine.device_memory import meter
from hybrid_rlhf.memory_plan.plan import Generation, Role, make_plan

CPU = torch.device("cpu")
LAYOUTS = {"one": (True, "all"), "four": (True, "none"), "full": (False, "none")}  # adapters, who shares
CASES = {
    "generation": Case("peak while generating", "weights and KV cache"),
    "ppo": Case("PPO's peak, one base", "base, KV cache, a micro-batch"),
    "shared": Case("PPO's peak, one base", "four LoRA bases", 2),
    "full": Case("PPO's peak, one base", "four full models", 4),
}
NEEDS = {"generation": ["generation"], "ppo": ["one", "activations"], "shared": ["one", "four"],
         "full": ["one", "full"]}  # what is measured for each case


class Size(NamedTuple):
    """Of a rollout, and the tokens of a micro-batch."""

    rows: int = 16
    prompt: int = 128
    response: int = 64
    tokens: int = 384

    @property
    def length(self) -> int:
        return self.prompt + self.response


# -- in a process of its own -------------------------------------------------------------------------------------------


def run_ppo(place: Path, layout: str, size: Size, steps: int) -> dict:
    """`steps` PPO steps; the engine's cache bytes and the peak of each phase of the last one."""
    is_lora, share = LAYOUTS[layout]
    roles, reward = roles_of(place, lora=is_lora, share=share, micro_batch_tokens=size.tokens)
    trainer = trainer_of(roles, reward, size.response)
    prompts = prompts_of(place, size.rows, size.prompt)
    for _ in range(steps):
        metrics = trainer.step(prompts)
    phases = {name.removeprefix("memory/"): value for name, value in metrics.compute().items()
              if name.startswith("memory/")}
    return {"kv": roles.actor.engine.kv_bytes, "base": base_bytes(roles.actor.engine.model), "phases": phases}


def base_bytes(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for n, p in model.named_parameters() if "lora_" not in n)


def run_generation(place: Path, size: Size) -> dict:
    """Generate in five mode switches; lasting: what is resident afterwards beyond what was after the first."""
    from hybrid_rlhf.engine import HybridEngine, SamplingConfig

    model = policy(place)
    engine = HybridEngine(model, model)
    prompts = prompts_of(place, size.rows, size.prompt).ids
    resident = []
    for _ in range(5):
        with engine.inference():
            engine.generate(prompts, SamplingConfig(max_new_tokens=size.response))
        gc.collect()
        resident.append(memory_status("VmRSS"))
    return {"kv": engine.kv_bytes, "base": base_bytes(model), "lasting": resident[-1] - resident[0]}


def policy(place: Path) -> torch.nn.Module:
    from hybrid_rlhf.models.load import load_causal_lm

    return load_causal_lm(policy_config(place)).eval()


def run_activations(place: Path, size: Size) -> dict:
    """One micro-batch of the LoRA actor, forward and backward, beyond the model itself."""
    from hybrid_rlhf.core.tensors import SequenceBatch
    from hybrid_rlhf.engine.train.patches import training_forms
    from hybrid_rlhf.models.lora import add_lora
    from hybrid_rlhf.roles import PolicyModule

    model = policy(place)
    add_lora(model, LORA)
    module = PolicyModule(model).train()
    rows = size.tokens // size.length
    peaks = []
    for count in (1, rows, rows):
        ids = torch.ones(count, size.length, dtype=torch.long)
        answers = torch.zeros_like(ids, dtype=torch.bool)
        answers[:, size.prompt:] = True
        gc.collect()
        before = memory_status("VmRSS")
        with meter.block(CPU) as peak, training_forms(module):
            module(SequenceBatch(ids, torch.ones_like(answers), answers), with_entropy=True).logprobs.sum().backward()
        peaks.append(peak[0] - before)
    return {"activations": peaks[-1]}


def run_part(part: str, folder: str, sizes: list[int], threads: int) -> dict:
    """Bytes over the idle process at the peak of a part, and what else it says."""
    torch.set_num_threads(threads)
    if not give_back_freed_blocks():
        print("this system's malloc cannot be told what to do with freed blocks", file=sys.stderr)
    place, size = Path(folder) / "models", Size(*sizes)
    run_ppo(Path(folder) / "tiny", "one", size, 1)  # everything that is imported and compiled on the way
    gc.collect()
    idle = memory_status("VmRSS")
    others = {"generation": run_generation, "activations": run_activations}
    with meter.block(CPU) as peak:
        result = others[part](place, size) if part in others else run_ppo(place, part, size, 2)
    phases = {name: value - idle for name, value in result.pop("phases", {}).items()}
    return result | {"peak": peak[0] - idle, "idle": idle, "phases": phases}


# -- in this one -------------------------------------------------------------------------------------------------------


def predicted(place: Path, layout: str, size: Size) -> int:
    """Bytes that the plan says this run needs at most."""
    is_lora, share = LAYOUTS[layout]
    frozen, trained = policy_config(place), policy_config(place, is_lora)
    base = "actor" if share == "all" else None
    shape = dict(length=size.length, rows=size.tokens // size.length)
    generation = Generation(size.rows, size.prompt, size.response)
    roles = [Role("actor", trained, **shape, predicted=size.response, trains=True, entropy=True, generation=generation),
             Role("ref", frozen, **shape, predicted=size.response, base=base),
             Role("critic", trained, **shape, trains=True, base=base),
             Role("reward", trained if base else frozen, **shape, base=base)]
    return make_plan("ppo", roles, CPU, None).peak


def row_in_mb(name: str, parts: dict[str, dict], place: Path, size: Size) -> dict:
    """ours and peer in MB; floor_ratio is ours over what must be held."""
    if name == "generation":
        ours, peer = parts["generation"]["peak"], parts["generation"]["base"] + parts["generation"]["kv"]
        extra = {"lasting_mb": parts["generation"]["lasting"] / 1e6}
    elif name == "ppo":
        held = {"base": parts["one"]["base"], "kv": parts["one"]["kv"],
                "activations": parts["activations"]["activations"]}
        ours, peer, extra = parts["one"]["peak"], sum(held.values()), {"must_hold_mb": in_mb(held)}
    else:
        ours, peer, extra = parts["one"]["peak"], parts[NEEDS[name][1]]["peak"], {}
    if layout := {"ppo": "one", "shared": "four", "full": "full"}.get(name):
        said, peak = predicted(place, layout, size), parts[layout]["peak"]
        extra |= {"idle_mb": parts[layout]["idle"] / 1e6, "phases_mb": in_mb(parts[layout]["phases"]),
                  "planned_mb": said / 1e6, "plan_is_off_by": said / peak - 1}
    floor_ratio = ours / peer if name in ("generation", "ppo") else None
    return row_of(name, CASES[name], ours / 1e6, peer / 1e6, "MB", floor_ratio, **extra)


def in_mb(sizes: dict[str, int]) -> dict[str, float]:
    return {name: size / 1e6 for name, size in sizes.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, CASES)
    parser.add_argument("--threads", type=int, default=2)
    options = parse(parser, argv)
    size = Size(*sizes_of(options, *Size()))
    with tempfile.TemporaryDirectory() as folder:
        for shape, name in (("tiny" if options.quick else "llama134m", "models"), ("tiny", "tiny")):
            make_folders(shape, Path(folder) / name)
        parts = {part: run_apart(run_part, part=part, folder=folder, sizes=size, threads=options.threads)
                 for part in dict.fromkeys(part for case in options.cases for part in NEEDS[case])}
        write_rows((row_in_mb(name, parts, Path(folder) / "models", size) for name in options.cases), options.json)


if __name__ == "__main__":
    main()
