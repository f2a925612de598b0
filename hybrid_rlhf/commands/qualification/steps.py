"""Steps of PPO and GRPO through the launcher, with all weights trained and with QLoRA: whether they run, and what they
take beside what --plan says."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import statistics
import traceback
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hybrid_rlhf.commands.qualification.equality import MEAN_DRIFT
from hybrid_rlhf.commands.qualification.findings import DIFFERS, FAILED, NOTE, PASSED, SKIPPED, Row, Task, first_line
from hybrid_rlhf.commands.qualification.random_inputs import DRY_SIZES, GIB, Sizes, choose_model, make_model, make_rows
from hybrid_rlhf.commands.qualification.speed import RATES
from hybrid_rlhf.core.config import UserError, parse
from hybrid_rlhf.engine.device_memory import meter
from hybrid_rlhf.memory_plan.amounts import size_text
from hybrid_rlhf.memory_plan.calibration import Calibration
from hybrid_rlhf.memory_plan.plan import Plan
from hybrid_rlhf.memory_plan.presets import closest, flags
from hybrid_rlhf.memory_plan.rates import Rates
from hybrid_rlhf.models import quantize
from hybrid_rlhf.training import memory_options, time_options, unread_options
from hybrid_rlhf.training.registry import STAGES

NUM_STEPS = 3
# Measured over predicted: bytes of the tensors of a phase (and so many bytes either way), seconds of a whole step.
MEMORY_BOUNDS, MEMORY_SLACK, TIME_BOUNDS = (0.5, 1.1), 64 << 20, (1 / 3, 3.0)
LARGE_CARD = 20 * GIB  # from here on the larger QLoRA model
PHASES = {"generate": "generate", "score": "score", "update": "train"}  # memory/*/PHASE -> time/PHASE
VERBS = {"generate": "generating", "score": "scoring", "train": "training"}


@dataclass(frozen=True)
class Case:
    """One run. per_parameter, on_disk: about so many bytes of the card and of the disk for each parameter."""

    method: str
    is_quantised: bool
    per_parameter: float
    on_disk: float


CASES = {"grpo-qlora": Case("grpo", True, 2.5, 8), "ppo-qlora": Case("ppo", True, 2.5, 10),
         "grpo": Case("grpo", False, 18, 22), "ppo": Case("ppo", False, 36, 40)}


def steps(task: Task) -> Iterator[Row]:
    """Rows of the run that the task names: the run itself, its memory, its seconds, and what a card holds beside."""
    case = CASES[task.name]
    if case.is_quantised:
        try:
            quantize.require("a 4-bit base")
        except UserError as error:
            yield task.row("run", SKIPPED, first_line(error))
            return
    is_large = task.device.type == "cuda" and torch.cuda.mem_get_info(task.device)[1] >= LARGE_CARD
    largest = "Qwen2.5-0.5B shape" if not case.is_quantised else f"Qwen2.5-{'3' if is_large else '1.5'}B shape"
    smallest = "Qwen2.5-0.5B shape" if case.is_quantised else "Llama-134M shape"
    name, reason = choose_model(task, case.per_parameter, case.on_disk, smallest, largest)
    if not name:
        yield task.row("run", SKIPPED, reason)
        return
    base, sizes = make_model(task, name), DRY_SIZES if task.is_dry else Sizes()
    make_rows(task, base, sizes)
    words = _words(task, case, base, sizes)
    if case.method == "ppo":
        reason, reward = _reward_model(task, case, base, sizes)
        if reason:
            yield task.row("reward model", FAILED, reason)
            return
        words += ["--roles.reward.model_name_or_path", str(reward)]
    yield from _measured(task, name, sizes, words)


# -- command lines -----------------------------------------------------------------------------------------------------


def _common(task: Task, case: Case, base: Path, sizes: Sizes, is_lora: bool) -> list[str]:
    preset = closest(torch.cuda.mem_get_info(task.device)[1] / GIB) if task.device.type == "cuda" else "cpu"
    held = flags(preset if preset in ("8gb", "12gb", "16gb") else "24gb") if case.is_quantised else [
        "--engine.micro_batch_tokens", "2048", "--model.gradient_checkpointing", "true"]
    lora = ["--model.lora.r", "16"] if is_lora and not case.is_quantised else []
    return [*held, *lora, "--model.model_name_or_path", str(base), "--train.logging_steps", "1",
            "--train.per_device_train_batch_size", str(sizes.rows), "--data.eval_fraction", "0"]


def _words(task: Task, case: Case, base: Path, sizes: Sizes) -> list[str]:
    """The command line of the run, but for its reward model."""
    num_samples = 4 if case.method == "grpo" else 1
    prompts = max(1, sizes.rows // num_samples)
    own = {"grpo": ["--ppo.sampling.num_samples", str(num_samples), "--train.per_device_train_batch_size",
                    str(prompts), "--reward.functions", f"[{task.folder / 'rewards.py'}:shorter]"],
           "ppo": []}[case.method]
    return ["--stage", case.method, *_common(task, case, base, sizes, is_lora=False), "--data.sources",
            str(task.folder / "prompts.jsonl"), "--data.max_prompt_length", str(sizes.prompt),
            "--ppo.sampling.max_new_tokens", str(sizes.response), "--ppo.num_ppo_epochs", "1",
            "--ppo.num_minibatches", "1", "--train.num_fixed_prompts", "0", "--train.max_steps", str(NUM_STEPS),
            "--output_dir", str(task.folder / task.name), *own]


def _reward_model(task: Task, case: Case, base: Path, sizes: Sizes) -> tuple[str, Path]:
    """(what went wrong, folder) of a reward model: adapters on the base, after one step."""
    folder = task.folder / f"{task.name}-reward"
    reason = _launched(task, [
        "--stage", "reward", *_common(task, case, base, sizes, is_lora=True), "--data.sources",
        str(task.folder / "pairs.jsonl"), "--data.max_length", str(2 * sizes.prompt),
        "--train.max_steps", "1", "--output_dir", str(folder)])
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return reason, folder


def _launched(task: Task, words: list[str]) -> str:
    """Runs a command line in this process, what it says into the log; one line if it did not end well, else ""."""
    from hybrid_rlhf.cli import main

    with task.log.open("a", encoding="utf-8") as log:
        print("$ hybrid-rlhf", *words, file=log, flush=True)
        start = log.tell()
        with redirect_stdout(log), redirect_stderr(log):
            try:
                code = main(words)
            except Exception as error:  # the row of this run says it, and the other parts go on
                traceback.print_exc(file=log)
                return first_line(error)
    if code == 0:
        return ""
    with task.log.open(encoding="utf-8", errors="replace") as log:
        log.seek(start)
        said = [line.strip() for line in log if line.startswith(("error", "warning"))] or ["no line says why"]
    return f"ended with exit code {code}: {said[-1]}"


# -- what it took ------------------------------------------------------------------------------------------------------


def _measured(task: Task, name: str, sizes: Sizes, words: list[str]) -> Iterator[Row]:
    try:
        plan = _plan_of(words)
    except Exception as error:  # the run itself can still be tried
        with task.log.open("a", encoding="utf-8") as log:
            traceback.print_exc(file=log)
        yield task.row("plan", FAILED, first_line(error))
        plan = None
    if task.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(task.device)
    reason = _launched(task, words)
    if reason:
        yield task.row("run", FAILED, f"{name}: {reason}")
        return
    out = task.folder / task.name
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [found for line in lines if "time/step" in (found := json.loads(line))]
    shutil.rmtree(out, ignore_errors=True)
    yield _run_row(task, name, sizes, metrics)
    if plan is not None:
        yield _memory_row(task, plan, metrics)
        yield _time_row(task, plan, metrics)
    if task.device.type == "cuda":
        yield _beside_row(task)


def _run_row(task: Task, name: str, sizes: Sizes, metrics: list[dict]) -> Row:
    """Whether all of its numbers are finite, and sampler and trainer agree."""
    broken = sorted({k for m in metrics for k, v in m.items() if isinstance(v, float) and not math.isfinite(v)
                     and k != "value/explained_variance"})
    drift = max((m.get("engine/logprob_drift", 0.0) for m in metrics), default=0.0)
    faults = [*([f"not finite: {', '.join(broken[:3])}"] if broken else []),
              *([f"{len(metrics)} of {NUM_STEPS} steps"] if len(metrics) != NUM_STEPS else []),
              *([f"log-probabilities of sampler and trainer differ by {drift:.2g}"] if drift > MEAN_DRIFT else [])]
    return task.row("run", DIFFERS if faults else PASSED,
                    f"{name}, {sizes.rows} x ({sizes.prompt} + {sizes.response}) tokens: "
                    + ("; ".join(faults) or f"{NUM_STEPS} steps and the export"), model=name, metrics=metrics)


def _plan_of(words: list[str]) -> Plan:
    """What --plan has for this command line."""
    row = STAGES[words[1]]
    config, _ = parse(importlib.import_module(row.module).Config, [*row.preset, *words[2:]],
                      prog=f"hybrid-rlhf --stage {words[1]}", unused=unread_options.of_stage(words[1]))
    config = replace(config, stage=words[1])  # type: ignore[type-var] - a frozen dataclass, as all are
    return memory_options.plans_of(config, memory_options.Place.here(None))[0]


def predicted_bytes(plan: Plan) -> dict[str, int]:
    """Bytes of tensors by phase, as the metrics name them: what a process has beside is not what torch counts."""
    tensors = replace(plan, lines=tuple(line for line in plan.lines if line.role != "process"))
    found: dict[str, int] = {}
    for phase in plan.phases:
        verb, _, role = phase.partition(" ")
        name = f"{role}/update" if verb in ("train", "step") and role else verb
        found[name] = max(found.get(name, 0), tensors.total(phase))
    return found


def measured_bytes(metrics: list[dict]) -> dict[str, int]:
    """The same names: peaks of scoring and generation over all roles, of updates by role."""
    found: dict[str, int] = {}
    for name, value in ((k, v) for m in metrics for k, v in m.items() if k.startswith("memory/") and k.count("/") == 2):
        _, role, phase = name.split("/")
        key = f"{role}/update" if phase == "update" else phase
        found[key] = max(found.get(key, 0), int(value))
    return found


def _memory_row(task: Task, plan: Plan, metrics: list[dict]) -> Row:
    predicted, measured = predicted_bytes(plan), measured_bytes(metrics)
    both = {name: (measured[name], predicted[name]) for name in measured if name in predicted}
    off = [name for name, pair in both.items() if not memory_agrees(*pair)]
    if task.device.type != "cuda":
        return task.row("memory", NOTE, "not compared: on a processor it is that of the whole process",
                        measured=measured, predicted=predicted)
    shown = off or [max(both, key=lambda name: measured[name])]
    return task.row("memory", DIFFERS if off else PASSED, "; ".join(
        f"{_named(n)} takes {size_text(both[n][0])}, predicted {size_text(both[n][1])}" for n in shown),
        measured=measured, predicted=predicted)


def _named(phase: str) -> str:
    role, _, is_update = phase.partition("/")
    return f"training the {role}" if is_update else VERBS.get(role, role)


def memory_agrees(measured: int, predicted: int) -> bool:
    least, most = MEMORY_BOUNDS
    return least * predicted - MEMORY_SLACK <= measured <= most * predicted + MEMORY_SLACK


def _time_row(task: Task, plan: Plan, metrics: list[dict]) -> Row:
    measured = {p: statistics.median(m.get(f"time/{p}", 0.0) for m in metrics[1:]) for p in PHASES.values()}
    stored = task.numbers(RATES).get("rates")
    whole = sum(measured.values())
    if not stored:
        return task.row("time", NOTE, f"a step takes {whole:.3g} s; nothing was measured to predict it by",
                        measured=measured)
    phases = time_options.times_of(plan, task.device, Rates.of(stored)).phases
    predicted = {"generate": phases.get("generate", 0.0), "score": phases.get("score", 0.0),
                 "train": sum(v for k, v in phases.items() if k.startswith(("train", "step")))}
    parts = ", ".join(f"{VERBS[p]} {measured[p]:.3g} ({predicted[p]:.3g})" for p in measured)
    state = NOTE if task.is_dry else PASSED if time_agrees(whole, sum(predicted.values())) else DIFFERS
    return task.row("time", state, f"a step takes {whole:.3g} s, predicted {sum(predicted.values()):.3g} s: {parts}"
                    + ("; too small to be judged" if task.is_dry else ""), measured=measured, predicted=predicted)


def time_agrees(measured: float, predicted: float) -> bool:
    return TIME_BOUNDS[0] * predicted <= measured <= TIME_BOUNDS[1] * predicted


def _beside_row(task: Task) -> Row:
    """What the card holds beside torch's tensors, for the calibration."""
    free, total = torch.cuda.mem_get_info(task.device)
    reserved = torch.cuda.memory_reserved(task.device)
    libraries = max(0, total - free - reserved - (task.foreign_bytes or 0))
    most_reserved, most_allocated = meter.highest_reserved(task.device), meter.highest(task.device)
    fragmentation = max(0.0, most_reserved / max(1, most_allocated) - 1)
    unknown = "" if task.foreign_bytes is not None else " (with what other programs hold)"
    return task.row("beside tensors", NOTE,
                    f"context and libraries {size_text(libraries)}{unknown}; torch held {fragmentation:.0%} more than "
                    f"its tensors took (the plan assumes {size_text(Calibration.libraries_bytes)} and "
                    f"{Calibration.fragmentation:.0%} where nothing was measured)",
                    libraries_bytes=libraries, fragmentation=fragmentation, is_exact=task.foreign_bytes is not None)
