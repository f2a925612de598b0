"""Peak resident memory over the idle interpreter, each case in a process of its own, beside what it must hold.

    python benchmarks/memory.py [--cases generation ppo shared full] [--json FILE] [--allocator NAME]

A Llama-shaped 134M base in bf16, 16 x (128 + 64) tokens, micro-batches of 384 tokens (two sequences), LoRA rank 16.
"Idle" is the process with all libraries loaded, after a PPO step of a tiny model.

generation  our decode engine against one copy of the weights and the KV cache; what five mode switches leave behind
ppo         four roles on one base against base + KV cache + the measured peak of one micro-batch's activations
shared      four bf16 models with LoRA actor and critic (peer) over one shared base (ours)
full        four models, actor and critic fully fine-tuned (peer), over one shared base (ours)

Under each case stands the peak of each role and phase (memory/{role}/{phase} of the second step), what --plan predicts,
and by how much it is off. The C library's allocator gives freed blocks back, as `train.py --memory` makes it;
--allocator keep is that of a run without --memory, and libc leaves it as it is.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import torch
from harness import machine, status, write_rows
from ppo_models import LORA, make_folders, prompts_of, roles_of, trainer_of

from hybrid_rlhf.core.allocator import give_back_freed_blocks, keep_freed_blocks
from hybrid_rlhf.engine.device_memory import meter
from hybrid_rlhf.memory_plan.plan import Generation, Role, make_plan
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig

SHAPE, ROWS, PROMPT, RESPONSE, TOKENS = "llama134m", 16, 128, 64, 384
CPU = torch.device("cpu")
ALLOCATORS = {"give_back": give_back_freed_blocks, "keep": keep_freed_blocks, "libc": lambda: True}
LAYOUTS = {"one": (True, "all"), "four": (True, "none"), "full": (False, "none")}  # adapters, who shares


# -- in the child ------------------------------------------------------------------------------------------------------


def run_ppo(place: Path, layout: str, steps: int) -> dict:
    """`steps` PPO steps; the engine's cache bytes and the peak of each phase, of the newest."""
    lora, share = LAYOUTS[layout]
    roles, reward = roles_of(place, lora=lora, share=share, micro_batch_tokens=TOKENS)
    trainer = trainer_of(roles, reward, RESPONSE)
    prompts = prompts_of(place, ROWS, PROMPT)
    for _ in range(steps):
        metrics = trainer.step(prompts)
    phases = {name.removeprefix("memory/"): value for name, value in metrics.compute().items()
              if name.startswith("memory/")}
    return {"kv": roles.actor.engine.kv_bytes, "base": base_bytes(roles.actor.engine.model), "phases": phases}


def base_bytes(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for n, p in model.named_parameters() if "lora_" not in n)


def run_generation(place: Path) -> dict:
    """Generate in five mode switches; lasting: what is resident afterwards beyond what was after the first."""
    from hybrid_rlhf.engine import HybridEngine, SamplingConfig

    model = policy(place)
    engine = HybridEngine(model, model)
    prompts = prompts_of(place, ROWS, PROMPT).ids
    resident = []
    for _ in range(5):
        with engine.inference():
            engine.generate(prompts, SamplingConfig(max_new_tokens=RESPONSE))
        gc.collect()
        resident.append(status("VmRSS"))
    return {"kv": engine.kv_bytes, "base": base_bytes(model), "lasting": resident[-1] - resident[0]}


def policy(place: Path) -> torch.nn.Module:
    from hybrid_rlhf.models.load import load_causal_lm

    return load_causal_lm(ModelConfig(model_name_or_path=str(place / "base"), dtype="bfloat16")).eval()


def run_activations(place: Path) -> dict:
    """One micro-batch of the LoRA actor, forward and backward, beyond the model itself."""
    from hybrid_rlhf.core.tensors import SequenceBatch
    from hybrid_rlhf.engine.train.patches import training_forms
    from hybrid_rlhf.models.lora import add_lora
    from hybrid_rlhf.roles import PolicyModule

    model = policy(place)
    add_lora(model, LORA)
    module = PolicyModule(model).train()
    rows = TOKENS // (PROMPT + RESPONSE)
    peaks = []
    for count in (1, rows, rows):
        ids = torch.ones(count, PROMPT + RESPONSE, dtype=torch.long)
        answers = torch.zeros_like(ids, dtype=torch.bool)
        answers[:, PROMPT:] = True
        gc.collect()
        before = status("VmRSS")
        with meter.block(CPU) as found, training_forms(module):
            module(SequenceBatch(ids, torch.ones_like(answers), answers), with_entropy=True).logprobs.sum().backward()
        peaks.append(found[0] - before)
    return {"activations": peaks[-1]}


def child(case: str, place: Path, tiny: Path, allocator: str) -> None:
    if not ALLOCATORS[allocator]():
        print("this system's malloc cannot be told what to do with freed blocks", file=sys.stderr)
    run_ppo(tiny, "one", 1)  # everything that is imported and compiled on the way
    gc.collect()
    idle = status("VmRSS")
    runs = {"generation": run_generation, "activations": run_activations}
    with meter.block(CPU) as peak:
        found = runs[case](place) if case in runs else run_ppo(place, case, 2)
    phases = {name: value - idle for name, value in found.pop("phases", {}).items()}
    print(json.dumps(found | {"peak": peak[0] - idle, "idle": idle, "phases": phases}))


# -- in the parent -----------------------------------------------------------------------------------------------------


def measured(case: str, place: Path, options: argparse.Namespace) -> dict:
    """What a child process found; its failure ends the benchmark."""
    command = [sys.executable, __file__, "--child", case, "--place", str(place), "--threads", str(options.threads)]
    done = subprocess.run([*command, "--allocator", options.allocator], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{case}: the measuring process failed with {done.returncode}; see above")
    return json.loads(done.stdout.splitlines()[-1])


def predicted(place: Path, layout: str) -> int:
    """What the plan says of this run."""
    lora, share = LAYOUTS[layout]
    frozen = ModelConfig(model_name_or_path=str(place / "base"), dtype="bfloat16")
    trained = ModelConfig(model_name_or_path=str(place / "base"), dtype="bfloat16", lora=LORA if lora else LoraConfig())
    base = "actor" if share == "all" else None
    shape = dict(length=PROMPT + RESPONSE, rows=TOKENS // (PROMPT + RESPONSE))
    generation = Generation(ROWS, PROMPT, RESPONSE)
    roles = [Role("actor", trained, **shape, predicted=RESPONSE, trains=True, entropy=True, generation=generation),
             Role("ref", frozen, **shape, predicted=RESPONSE, base=base),
             Role("critic", trained, **shape, trains=True, base=base),
             Role("reward", trained if base else frozen, **shape, base=base)]
    return make_plan("ppo", roles, torch.device("cpu"), None).peak


def compare(case: str, found: dict[str, dict], place: Path) -> dict:
    """One row: ours and peer in MB; floor_ratio is ours over what must be held."""
    one = found["one"]["peak"] if "one" in found else 0
    if case == "generation":
        ours, peer = found["generation"]["peak"], found["generation"]["base"] + found["generation"]["kv"]
        print(f"{'':12} five mode switches leave {found['generation']['lasting'] / 1e6:.1f} MB")
    elif case == "ppo":
        need = found["one"]["base"] + found["one"]["kv"] + found["activations"]["activations"]
        print(f"{'':12} base {found['one']['base'] / 1e6:.0f}, KV cache {found['one']['kv'] / 1e6:.0f}, activations of "
              f"a micro-batch {found['activations']['activations'] / 1e6:.0f} MB")
        ours, peer = one, need
    else:
        ours, peer = one, found[_PEER[case]]["peak"]
    row = {"case": case, "ours": ours / 1e6, "peer": peer / 1e6, "ratio": peer / ours,
           "floor_ratio": ours / peer if case in ("generation", "ppo") else None, "unit": "MB", "machine": machine()}
    print(f"{case:12} ours {row['ours']:7.0f} MB  against {row['peer']:7.0f} MB  ratio {row['ratio']:.2f}", flush=True)
    for layout in {"ppo": ("one",), "shared": ("four",), "full": ("full",)}.get(case, ()):
        print(f"{'':12} idle {found[layout]['idle'] / 1e6:.0f} MB; over it, in MB:",
              ", ".join(f"{name} {size / 1e6:.0f}" for name, size in found[layout]["phases"].items()))
        said, was = predicted(place, layout), found[layout]["peak"]
        print(f"{'':12} plan of {layout}: {said / 1e6:.0f} MB, measured {was / 1e6:.0f} MB, "
              f"off by {said / was - 1:+.1%}", flush=True)
    return row


_PEER = {"shared": "four", "full": "full"}
_NEEDS = {"generation": ["generation"], "ppo": ["one", "activations"], "shared": ["one", "four"],
          "full": ["one", "full"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(_NEEDS), default=list(_NEEDS))
    parser.add_argument("--shape", default=SHAPE)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--allocator", choices=list(ALLOCATORS), default="give_back")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        child(options.child, Path(options.place) / "models", Path(options.place) / "tiny", options.allocator)
        return
    with tempfile.TemporaryDirectory() as folder:
        for shape, name in ((options.shape, "models"), ("tiny", "tiny")):
            make_folders(shape, Path(folder) / name)
        found = {case: measured(case, Path(folder), options)
                 for case in dict.fromkeys(n for c in options.cases for n in _NEEDS[c])}
        write_rows((compare(case, found, Path(folder) / "models") for case in options.cases), options.json)


if __name__ == "__main__":
    main()
