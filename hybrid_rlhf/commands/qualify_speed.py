"""Measure a GPU's speed, and compare time and memory of PPO and GRPO steps with the prediction of --plan."""

from __future__ import annotations

import gc
import json
import math
import shutil
import statistics
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from hybrid_rlhf.commands.qualify_numbers import MEAN_DRIFT
from hybrid_rlhf.commands.qualify_page import NO_TIME, Row, State, Task, first_line
from hybrid_rlhf.core import accelerator, own_files
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data.chat import CHATML
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.device_memory import meter
from hybrid_rlhf.memory_plan.amounts import size_text
from hybrid_rlhf.memory_plan.machine_rates import can_measure, card_rates, copies, machine_rates, seconds_of
from hybrid_rlhf.memory_plan.plan import Plan
from hybrid_rlhf.memory_plan.presets import closest, flags
from hybrid_rlhf.memory_plan.rates import Calibration, Rates
from hybrid_rlhf.models import quantize
from hybrid_rlhf.models.load import random_model
from hybrid_rlhf.models.tokenizer import load_tokenizer, train_tokenizer
from hybrid_rlhf.training import memory_options

GIB = 2**30
SLOW = 3.0  # a captured decode step may take so many times the time of reading the weights
# Measured over predicted: bytes of the tensors of a phase (plus or minus the slack), seconds of a step.
MEMORY_BOUNDS, MEMORY_SLACK, TIME_BOUNDS = (0.5, 1.1), 64 << 20, (1 / 3, 3.0)
NUM_STEPS = 3
PHASES = {"generate": "generate", "score": "score", "update": "train"}  # memory/*/PHASE -> time/PHASE
VERBS = {"generate": "generating", "score": "scoring", "train": "training"}

_TINY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=499, max_position_embeddings=256)
_LLAMA_134M = dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
                   num_key_value_heads=12, vocab_size=32000, max_position_embeddings=4096)
_LLAMA_1B = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
                 num_key_value_heads=8, vocab_size=128256, max_position_embeddings=4096, tie_word_embeddings=True)


def _qwen(hidden: int, mlp: int, layers: int, heads: int) -> dict:
    return dict(hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=2, vocab_size=151936, max_position_embeddings=4096, tie_word_embeddings=True)


# name: (parameters, transformers' model_type, settings), largest first.
MODELS = {"Qwen2.5-3B shape": (3.09e9, "qwen2", _qwen(2048, 11008, 36, 16)),
          "Qwen2.5-1.5B shape": (1.54e9, "qwen2", _qwen(1536, 8960, 28, 12)),
          "Qwen2.5-0.5B shape": (0.49e9, "qwen2", _qwen(896, 4864, 24, 14)),
          "Llama-134M shape": (0.134e9, "llama", _LLAMA_134M), "tiny Qwen2": (1e5, "qwen2", _TINY)}
WORDS = ["red", "blue", "green", "sea", "cat", "dog", "fox", "sun", "moon", "tree", "old", "book", "river", "stone"]
REWARD = "def shorter(completions):\n    return [1 / (1 + len(text)) for text in completions]\n"


class Sizes(NamedTuple):
    """Sizes of one step: rows, tokens of a prompt and of a response."""

    rows: int
    prompt: int
    response: int


class Case(NamedTuple):
    """One run. per_parameter, on_disk: approximate bytes of the card and of the disk per parameter."""

    method: str
    is_quantised: bool
    per_parameter: float
    on_disk: float

    @property
    def models(self) -> list[str]:
        """The names in MODELS that it may run on, largest first."""
        return list(MODELS)[:3] if self.is_quantised else list(MODELS)[2:4]


CASES = {"grpo-qlora": Case("grpo", True, 2.5, 8), "ppo-qlora": Case("ppo", True, 2.5, 10),
         "grpo": Case("grpo", False, 18, 22), "ppo": Case("ppo", False, 36, 40)}


# -- rates of the card, a decode step and a rollout --------------------------------------------------------------------


def speed(task: Task) -> Iterator[Row]:
    dtype = accelerator.automatic_dtype(task.device)
    rates = None
    if task.device.type != "cpu":
        rates = card_rates(task.device, dtype, is_dry=task.is_dry)
    elif can_measure():
        rates = machine_rates(dtype)
    if rates is not None:
        products = ", ".join(f"{points[-1][1] / 1e12:.3g} TFLOPS {name}" for name, points in rates.products.items())
        yield task.row("rates", State.NOTE, f"a copy moves {rates.peak_memory / 1e9:.3g} GB/s; products {products}; "
                       f"the host needs {1e6 * rates.launch:.3g} us for an operation", rates=rates.stored())
    if task.left < 20 and not task.is_dry:
        yield task.row("decode step", State.SKIPPED, NO_TIME)
        return
    yield from _decoding(task, dtype, rates.peak_memory if rates else copies()[-1][1])


@torch.no_grad()
def _decoding(task: Task, dtype: torch.dtype, rate: float) -> Iterator[Row]:
    """Time of a decode step of 8 sequences, relative to reading the weights, and tokens per second of a rollout."""
    device, sizes = task.device, Sizes(4, 8, 16) if task.is_dry else Sizes(8, 256, 128)
    is_small = device.type == "cuda" and torch.cuda.mem_get_info(device)[1] < 6 * GIB
    name, shape = ("tiny Llama", _TINY) if task.is_dry else (
        ("Llama-134M shape", _LLAMA_134M) if is_small else ("Llama-1B shape", _LLAMA_1B))
    with torch.device(device if device.type == "cuda" and not task.is_dry else "cpu"):
        model = random_model("llama", shape | dict(pad_token_id=0, bos_token_id=1, eos_token_id=2), 0, dtype)
    model = model.to(device).eval()
    random = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, shape["vocab_size"], (sizes.rows, sizes.prompt), generator=random).tolist()
    engine = HybridEngine(model, model, max_batch=sizes.rows)

    def generate(length: int) -> None:
        engine.generate(prompts, SamplingConfig(max_new_tokens=length), seed=0)

    def rollout() -> None:
        with engine.inference():
            generate(sizes.response)

    rollout_seconds = seconds_of(rollout, device)
    with engine.inference():
        long, short = (seconds_of(lambda n=n: generate(n), device) for n in (sizes.response, sizes.response // 2))
        description = engine.describe()
    step = max(long - short, 1e-9) / (sizes.response - sizes.response // 2)
    weights = {m.weight.data_ptr(): m.weight.nbytes for m in model.modules() if isinstance(m, nn.Linear)}
    num_bytes = sum(weights.values())
    ratio = step * rate / num_bytes
    is_slow, is_captured = not task.is_dry and ratio > SLOW, bool(description["captured"])
    case = f"{name}, {sizes.rows} sequences of {sizes.prompt} + {sizes.response} tokens"
    text = (f"{1000 * step:.3g} ms for a token of each, {ratio:.3g} times what reading the weights "
            f"({size_text(num_bytes)}) takes ({case})")
    if is_slow:
        text += f"; more than {SLOW:g} times is slow"
    if not is_captured and device.type == "cuda":
        text += f"; without CUDA graphs, which is slow: {description.get('refused')}"
    state = State.NOTE if task.is_dry else State.DIFFERS if is_slow or not is_captured else State.PASSED
    yield task.row("decode step", state, text, seconds=step, over_reading=ratio, case=case,
                   engine={k: str(v) for k, v in description.items()})
    per_second = sizes.rows * sizes.response / rollout_seconds
    yield task.row("rollout", State.NOTE, f"{per_second:.4g} tokens/s", tokens_per_second=per_second,
                   seconds=rollout_seconds)


# -- steps of PPO and GRPO ---------------------------------------------------------------------------------------------


def steps(task: Task) -> Iterator[Row]:
    """Rows of the task's run: the run, its memory, its seconds, and memory of the card beside tensors."""
    from hybrid_rlhf.cli import read_settings

    case, sizes = CASES[task.name], Sizes(4, 40, 8) if task.is_dry else Sizes(8, 128, 128)
    try:
        if case.is_quantised:
            quantize.require("a 4-bit base")
        name = choose_model(task, case)
    except UserError as error:
        yield task.row("run", State.SKIPPED, first_line(error))
        return
    base = make_inputs(task, name, sizes)
    words = _words(task, case, base, sizes)
    if case.method == "ppo":
        folder = task.folder / f"{task.name}-reward"
        reason = _launched(task, [
            "--stage", "reward", *_common(task, case, base, sizes), "--data.sources", str(task.folder / "pairs.jsonl"),
            *([] if case.is_quantised else ["--model.lora.r", "16"]), "--data.max_length", str(2 * sizes.prompt),
            "--train.max_steps", "1", "--output_dir", str(folder)])
        if reason:
            yield task.row("reward model", State.FAILED, reason)
            return
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        words += ["--roles.reward.model_name_or_path", str(folder)]
    plan: Plan | None = None
    try:
        config, _ = read_settings(words[1], words[2:])
        plan = memory_options.plans_of(config, memory_options.Place.here(None))[0]
    except Exception as error:  # the run itself can still be tried
        yield task.failed("plan", error)
    if task.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(task.device)
    if reason := _launched(task, words):
        yield task.row("run", State.FAILED, f"{name}: {reason}")
        return
    out = task.folder / task.name
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [values for line in lines if "time/step" in (values := json.loads(line))]
    shutil.rmtree(out, ignore_errors=True)
    yield run_row(task, name, sizes, metrics)
    if plan is not None:
        yield memory_row(task, plan, metrics)
        yield time_row(task, plan, metrics)
    if task.device.type == "cuda":
        yield _beside_row(task)


def choose_model(task: Task, case: Case) -> str:
    """The largest of the case's models that fits into the free memory of the card (less 1.5 GiB) and onto the disk.
    UserError where none does."""
    if task.is_dry:
        return "tiny Qwen2"
    free, total = torch.cuda.mem_get_info(task.device)
    disk = shutil.disk_usage(task.folder).free - GIB
    names = [name for name in case.models if total >= 20 * GIB or name != "Qwen2.5-3B shape"]
    for name in names:
        count = MODELS[name][0]
        if count * case.per_parameter <= 0.95 * free - 1.5 * GIB and count * case.on_disk <= disk:
            return name
    if count * case.on_disk > disk:
        raise UserError(f"the disk is too full: {case.on_disk * count / GIB + 1:.0f} GiB are needed in {task.folder}")
    raise UserError(f"too little of the card is free: {count * case.per_parameter / GIB + 1.5:.1f} GiB are needed")


def make_inputs(task: Task, name: str, sizes: Sizes) -> Path:
    """The model's folder (weights in the card's 16-bit dtype and a tokenizer), created if missing; beside it
    prompts.jsonl, pairs.jsonl and rewards.py. Prompts have nearly the maximum length."""
    folder = task.folder / name.replace(" ", "-")
    if not folder.exists():
        _, kind, shape = MODELS[name]
        tokenizer = train_tokenizer([" ".join(WORDS)] * 4, 300)
        tokenizer.chat_template = CHATML
        ids = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
        on_card = task.device.type == "cuda" and not task.is_dry  # drawing 1e9 numbers takes a CPU a minute
        with torch.device(task.device if on_card else "cpu"):
            model = random_model(kind, shape | ids, 0, accelerator.automatic_dtype(task.device))
        with own_files.fresh_folder(task.folder) as fresh:
            model.save_pretrained(fresh)
            tokenizer.save_pretrained(fresh)
            fresh.rename(folder)
        del model
        gc.collect()  # the model may be in a reference cycle, and takes gigabytes of the card
        if task.device.type == "cuda":
            torch.cuda.empty_cache()
    tokenizer, random = load_tokenizer(str(folder)), torch.Generator().manual_seed(2)
    room = sizes.prompt - len(tokenizer("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")["input_ids"]) - 2
    prompts = []
    for number in range(4 * sizes.rows):
        picks = torch.randint(len(WORDS), (room,), generator=random).tolist()
        ids = tokenizer(" ".join([str(number), *(WORDS[pick] for pick in picks)]))["input_ids"]
        prompts.append(tokenizer.decode(ids[:room]))
    pairs = [{"prompt": prompt, "chosen": "a small red fox", "rejected": "no"} for prompt in prompts]
    for stem, rows in (("prompts", [{"prompt": prompt} for prompt in prompts]), ("pairs", pairs)):
        (task.folder / f"{stem}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (task.folder / "rewards.py").write_text(REWARD, encoding="utf-8")
    return folder


def _common(task: Task, case: Case, base: Path, sizes: Sizes) -> list[str]:
    """Options of the run and of its reward model."""
    preset = closest(torch.cuda.mem_get_info(task.device)[1] / GIB) if task.device.type == "cuda" else "cpu"
    settings = flags(preset if preset in ("8gb", "12gb", "16gb") else "24gb") if case.is_quantised else [
        "--engine.micro_batch_tokens", "2048", "--model.gradient_checkpointing", "true"]
    return [*settings, "--model.model_name_or_path", str(base), "--train.logging_steps", "1",
            "--train.per_device_train_batch_size", str(sizes.rows), "--data.eval_fraction", "0"]


def _words(task: Task, case: Case, base: Path, sizes: Sizes) -> list[str]:
    """The command line of the run, without its reward model."""
    num_samples = 4
    extra = [] if case.method == "ppo" else [
        "--ppo.sampling.num_samples", str(num_samples), "--train.per_device_train_batch_size",
        str(max(1, sizes.rows // num_samples)), "--reward.functions", f"[{task.folder / 'rewards.py'}:shorter]"]
    return ["--stage", case.method, *_common(task, case, base, sizes), "--data.sources",
            str(task.folder / "prompts.jsonl"), "--data.max_prompt_length", str(sizes.prompt),
            "--ppo.sampling.max_new_tokens", str(sizes.response), "--ppo.num_ppo_epochs", "1",
            "--ppo.num_minibatches", "1", "--train.num_fixed_prompts", "0", "--train.max_steps", str(NUM_STEPS),
            "--output_dir", str(task.folder / task.name), *extra]


def _launched(task: Task, words: list[str]) -> str:
    """Run a command line in this process, with output to the log; returns one line if it failed, else ""."""
    from hybrid_rlhf.cli import main

    with task.log.open("a+", encoding="utf-8", errors="replace") as log:
        print("$ hybrid-rlhf", *words, file=log, flush=True)
        start = log.tell()
        with redirect_stdout(log), redirect_stderr(log):
            try:
                code = main(words)
            except Exception as error:  # reported in this run's row; the other parts continue
                return task.failed("", error).detail
        log.seek(start)
        lines = [line.strip() for line in log if line.startswith(("error", "warning"))] or ["no line says why"]
    return f"ended with exit code {code}: {lines[-1]}" if code else ""


def run_row(task: Task, name: str, sizes: Sizes, metrics: list[dict]) -> Row:
    """The run's row: whether all its metrics are finite, and sampler and trainer agree."""
    broken = sorted({k for m in metrics for k, v in m.items() if isinstance(v, float) and not math.isfinite(v)
                     and k != "value/explained_variance"})
    drift = max((m.get("engine/logprob_drift", 0.0) for m in metrics), default=0.0)
    faults = [*([f"not finite: {', '.join(broken[:3])}"] if broken else []),
              *([f"{len(metrics)} of {NUM_STEPS} steps"] if len(metrics) != NUM_STEPS else []),
              *([f"log-probabilities of sampler and trainer differ by {drift:.2g}"] if drift > MEAN_DRIFT else [])]
    return task.row("run", State.DIFFERS if faults else State.PASSED,
                    f"{name}, {sizes.rows} x ({sizes.prompt} + {sizes.response}) tokens: "
                    + ("; ".join(faults) or f"{NUM_STEPS} steps and the export"), model=name, metrics=metrics)


def memory_row(task: Task, plan: Plan, metrics: list[dict]) -> Row:
    """Memory peaks of the phases against the plan's: of scoring and generation over all roles, of updates by role."""
    measured: dict[str, int] = {}
    for key, value in ((k, v) for m in metrics for k, v in m.items() if k.startswith("memory/") and k.count("/") == 2):
        _, role, phase = key.split("/")
        name = f"{role}/update" if phase == "update" else phase
        measured[name] = max(measured.get(name, 0), int(value))
    tensors = replace(plan, lines=tuple(line for line in plan.lines if line.role != "process"))  # what torch counts
    predicted: dict[str, int] = {}
    for phase in plan.phases:
        verb, _, role = phase.partition(" ")
        name = f"{role}/update" if verb in ("train", "step") and role else verb
        predicted[name] = max(predicted.get(name, 0), tensors.total(phase))
    numbers = dict(measured=measured, predicted=predicted)
    if task.device.type != "cuda":
        return task.row("memory", State.NOTE, "not compared: on a processor it is that of the whole process", **numbers)
    both = [name for name in measured if name in predicted]
    off = [name for name in both if not MEMORY_BOUNDS[0] * predicted[name] - MEMORY_SLACK <= measured[name]
           <= MEMORY_BOUNDS[1] * predicted[name] + MEMORY_SLACK]
    text = "; ".join(f"{_phase_text(name)} takes {size_text(measured[name])}, predicted {size_text(predicted[name])}"
                     for name in off or [max(both, key=measured.__getitem__)])
    return task.row("memory", State.DIFFERS if off else State.PASSED, text, **numbers)


def _phase_text(name: str) -> str:
    role, _, is_update = name.partition("/")
    return f"training the {role}" if is_update else VERBS.get(role, role)


def time_row(task: Task, plan: Plan, metrics: list[dict]) -> Row:
    """Seconds of a step against the plan's prediction by the rates that the speed part has measured."""
    measured = {p: statistics.median(m.get(f"time/{p}", 0.0) for m in metrics[1:]) for p in PHASES.values()}
    total = sum(measured.values())
    if not task.rates:
        return task.row("time", State.NOTE, f"a step takes {total:.3g} s; nothing was measured to predict it by",
                        measured=measured)
    phases = memory_options.times_of(plan, task.device, Rates.of(task.rates)).phases
    predicted = {"generate": phases.get("generate", 0.0), "score": phases.get("score", 0.0),
                 "train": sum(v for k, v in phases.items() if k.startswith(("train", "step")))}
    expected = sum(predicted.values())
    parts = ", ".join(f"{VERBS[p]} {measured[p]:.3g} ({predicted[p]:.3g})" for p in measured)
    text = f"a step takes {total:.3g} s, predicted {expected:.3g} s: {parts}"
    if task.is_dry:
        return task.row("time", State.NOTE, f"{text}; too small to be judged", measured=measured, predicted=predicted)
    agrees = TIME_BOUNDS[0] * expected <= total <= TIME_BOUNDS[1] * expected
    return task.row("time", State.PASSED if agrees else State.DIFFERS, text, measured=measured, predicted=predicted)


def _beside_row(task: Task) -> Row:
    """Memory of the card beside torch's tensors, for the calibration."""
    free, total = torch.cuda.mem_get_info(task.device)
    libraries = max(0, total - free - torch.cuda.memory_reserved(task.device) - (task.foreign_bytes or 0))
    fragmentation = max(0.0, meter.highest_reserved(task.device) / max(1, meter.highest(task.device)) - 1)
    unknown = "" if task.foreign_bytes is not None else " (with what other programs hold)"
    return task.row("beside tensors", State.NOTE,
                    f"context and libraries {size_text(libraries)}{unknown}; torch held {fragmentation:.0%} more than "
                    f"its tensors took (the plan assumes {size_text(Calibration.libraries_bytes)} and "
                    f"{Calibration.fragmentation:.0%} where nothing was measured)",
                    libraries_bytes=libraries, fragmentation=fragmentation, is_exact=task.foreign_bytes is not None)
