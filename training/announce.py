"""Print a summary of a run to stderr before its first step, and the commands for what comes next after its last."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from hybrid_rlhf.core.accelerator import device_line
from hybrid_rlhf.core.compat import TESTED, releases_line
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import device, is_main, print_main
from hybrid_rlhf.core.memory import explained
from hybrid_rlhf.core.options import value_of
from hybrid_rlhf.core.own_files import is_unfinished
from hybrid_rlhf.data import datasets
from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.data.loader import Loader
from hybrid_rlhf.data.sources import Source
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.train.parameters import count_parameters, share_unquantised, without_adapter
from hybrid_rlhf.export import gguf
from hybrid_rlhf.report.summary import PAGE
from hybrid_rlhf.report.terminal import duration
from hybrid_rlhf.run import runfile
from hybrid_rlhf.training import builders, defaults
from hybrid_rlhf.training.registry import STAGES

# Settings that the proposed next stage takes over from this one: memory and data layout depend on them.
CARRIED = ("model.lora.r", "model.load_in_4bit", "model.load_in_8bit", "model.dtype", "model.trust_remote_code",
           "data.split", "data.raw")
PLACEHOLDERS = {"reward": "PAIRS.jsonl", "ppo": "PROMPTS.jsonl"}  # where the run's data has no such rows


def before(record: runfile.RunRecord, config: object, engines: Mapping[str, HybridEngine], start: str, num_steps: int,
           loader: Loader, learns_from: Iterable[str | None] = ()) -> None:
    """Print lines about the model, the device, the method's settings and the run (but of one that a replay takes again
    in a folder that is removed, which had them); the report begins with them.
    engines: of the trained roles; start: the run or model that the run starts from; learns_from: lines about a teacher
    and a reward model."""
    decoding = _decoding_line(engines["actor"], config.method.sampling) if hasattr(config, "method") else None
    lines = [_model_line(config, engines, start), *learns_from, device_line(), releases_line(), decoding,
             f"settings: {defaults.settings_line(config)}", _run_line(config, num_steps, loader)]
    lines = [line for line in [*lines, record.resumes_from and f"resuming from {record.resumes_from}"] if line]
    record.facts["header"] = [*record.facts.get("header", []), *lines]
    record.write()
    if not any(map(is_unfinished, Path(record.output_dir).parts)):
        print_main(*lines)


def _model_line(config: object, engines: Mapping[str, HybridEngine], start: str) -> str:
    counts = [f"{f'{role} ' if len(engines) > 1 else ''}{_share(*count_parameters(engine))}"
              for role, engine in engines.items()]
    how = f" by LoRA of rank {config.model.lora.r}" if config.model.lora.r else ""
    first = next(iter(engines.values()))
    if config.model.lora.r and config.model.lora.target_modules == "all-linear":
        share, names = without_adapter(first.module.model)
        how += f" (none for {', '.join(names)}: {share:.0%} of the weights)" if share > 0.1 else ""
    dtype = next(first.module.parameters()).dtype
    kind = str(dtype).removeprefix("torch.")
    if config.model.quantize:
        kind = f"{config.model.quantize} base ({share_unquantised(first):.0%} of it left in {kind})"
    why = defaults.reason(config, dtype, count_parameters(first)[1])
    return f"model: {start}; trained: {', '.join(counts)}{how}; {kind} on {device().type}{why}"


def _decoding_line(engine: HybridEngine, sampling: SamplingConfig) -> str:
    """How the policy generates, which is known after its first entry into inference mode, with a warning where models
    of its type decode natively with the tested releases; and its sampling, which ignores generation_config.json."""
    with explained("while generating"), engine.inference():
        pass
    ways = engine.describe()
    path = {"native": "native", "eager": "eager (the model's own attention)",
            "generate": "by transformers' generate"}[ways["path"]]
    slower = ways["not_native"] and (
        "; warning: slower than models of this type decode with "
        f"transformers {TESTED['transformers']} ({ways['not_native']})")
    settings = {name: getattr(sampling, name) for name in ("temperature", "max_new_tokens", "top_p", "top_k", "min_p")}
    plain = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    drawn = ", ".join(f"{name} {value:g}" for name, value in settings.items() if value != plain.get(name))
    defaults_of_chat = engine.model.generation_config.to_diff_dict()
    published = [name for name, value in settings.items() if name in ("temperature", *plain)
                 and defaults_of_chat.get(name) not in (None, value)]
    ignored = f" (generation_config.json's {', '.join(published)} are for chat alone)" if published else ""
    return f"decoding: {path}, kernels: {ways['kernels']}; {drawn}{ignored}{slower or ''}"


def teacher_line(path: str, engine: HybridEngine, student: HybridEngine, quantize: str | None) -> str:
    """One line with the teacher's path, its size, and its dtype or the base that it shares."""
    shares_base = engine.module.model is student.module.model
    kind = str(next(engine.module.parameters()).dtype).removeprefix("torch.")
    what = "computed on the student's own base" if shares_base else (
        f"{_millions(count_parameters(engine)[1])} parameters; {f'{quantize} base' if quantize else kind}")
    return f"teacher: {path}; {what}"


def _run_line(config: object, num_steps: int, loader: Loader) -> str:
    rows = loader.batch_size * loader.world
    sampling = config.method.sampling if hasattr(config, "method") else None
    noun = "prompt" if sampling else "row"
    what = _counted(rows, noun) + (_tokens(loader, config.data.max_length) if config.data.packing else "")
    what += f" with {sampling.num_samples} responses each" if sampling and sampling.num_samples > 1 else ""
    limit = f", no step begins after {duration(config.train.max_seconds)}" if config.train.max_seconds else ""
    return (f"run: {_counted(num_steps, 'step')} of {what} ({num_steps / len(loader):.3g} "
            f"epoch{'s' * (num_steps != len(loader))}{_last_batch(loader, noun, num_steps)}){limit}, "
            f"to {config.output_dir}")


def _last_batch(loader: Loader, what: str, num_steps: int) -> str:
    """What happens to the rows of an epoch that do not fill a batch, where an epoch ends within the run."""
    if not loader.num_left or num_steps < len(loader):
        return ""
    if loader.drop_last:
        verb, others = "is" if loader.num_left == 1 else "are", ", others in the next" * (num_steps > len(loader))
        return f"; {loader.num_left} of {len(loader.rows)} {what}s {verb} left out of each epoch{others}"
    return f"; the last step of each epoch has {_counted(loader.num_left, what)}"


def _tokens(loader: Loader, max_length: int) -> str:
    """About how many tokens a packed batch has, estimated from at most 512 rows spread over the data."""
    num_rows = len(loader.rows)
    some = [len(loader.rows[i]["input_ids"]) for i in range(0, num_rows, -(-num_rows // 512))]
    tokens = loader.batch_size * loader.world * sum(some) / len(some)
    return f", about {tokens:,.0f} tokens packed into rows of at most {max_length}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _share(trained: int, total: int) -> str:
    share = "all" if trained == total else f"{_millions(trained)} of"
    return f"{share} {_millions(total)} parameters"


def _millions(number: int) -> str:
    """139.5M, 1.24B, 12,345."""
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return f"{number:,}"


def after(config: object, program: str) -> None:
    """Print where the model and the report of a finished run are, and the commands for what comes next.

    program: the program that the user started, sys.argv[0].
    """
    folder = Path(config.output_dir)
    if not is_main() or not runfile.is_run(folder) or config.stage in ("evaluate", "all"):
        return
    adapter = f", the adapter alone: {folder / 'adapter'}" if (folder / "adapter").exists() else ""
    print_main(f"model: {folder / builders.MODEL_FOLDER}{adapter}", f"report: {folder / PAGE}")
    onward(config, program)


def onward(config: object, program: str) -> None:
    """Print the commands for what comes next after a finished run."""
    record, program = runfile.read_run(config.output_dir), _started_by(program)
    print_main(f"chat: {program} {_chat(record)}", f"next: {program} {_next(config, record)}")


def _started_by(program: str) -> str:
    """The words of a command line: python and the path of train.py, or else hybrid-rlhf."""
    return f"python {shlex.quote(program)}" if program.endswith(".py") else "hybrid-rlhf"


def _chat(record: runfile.RunRecord) -> str:
    """Arguments of a chat with the model, beside the run that it started from and with the reward model's scores where
    there are such runs; for a reward model, of a chat with its parent run, scored by it."""
    path, parent = str(Path(record.output_dir)), _run_or_none(record.facts.get("base_model"))
    if record.stage == "reward":
        model = parent or builders.model_folder(record.facts["base_model"])
        return f"chat --model {shlex.quote(model)} --reward_model {shlex.quote(path)}"
    reward = _run_or_none(record.facts.get("reward_model"))
    names = {Path(run).name: run for run in (parent, path) if run}
    models = " ".join(shlex.quote(f"{name}={run}") for name, run in names.items()) if len(names) > 1 else (
        shlex.quote(path))
    return f"chat --model {models}" + (f" --reward_model {shlex.quote(reward)}" if reward else "")


def _run_or_none(path: str | None) -> str | None:
    return path if path and runfile.is_run(path) else None


def _next(config: object, record: runfile.RunRecord) -> str:
    """Arguments of the next stage of the three, or after the last stage of an export."""
    folder = Path(record.output_dir)
    stage = STAGES[record.stage].followed_by if record.stage in STAGES else None
    if stage is None:
        kind = _model_type(folder / builders.MODEL_FOLDER)
        return (f"export --model {shlex.quote(str(folder))} --output_dir {shlex.quote(f'{folder}-export')}"
                + " --gguf f16" * (kind is None or kind in gguf.ROWS))
    words = ["--stage", stage, "--data.sources", _sources(config.data, stage)]
    words += [word for option in CARRIED for word in _carried(config, option)]
    target = folder.parent / stage
    if target.exists():  # of another run
        target = folder.parent / f"{folder.name}-{stage}"
    start = folder if stage == "reward" else record.facts["base_model"]
    if not _is_found(start, target, "sft"):
        words += ["--model.model_name_or_path", str(start)]
    if stage == "ppo" and not _is_found(folder, target, "reward"):
        words += ["--roles.reward.model_name_or_path", str(folder)]
    return shlex.join([*words, "--output_dir", str(target)])


def _model_type(folder: Path) -> str | None:
    """model_type of the model in `folder`; None where there is none."""
    path = folder / "config.json"
    return json.loads(path.read_text(encoding="utf-8")).get("model_type") if path.exists() else None


def _is_found(path: str | Path, target: Path, name: str) -> bool:
    """Whether a run in `target` finds `path` by default, as the folder `name` beside it."""
    return Path(path) == target.parent / name


def _sources(data: DataConfig, stage: str) -> str:
    """The run's data sources that have rows for the next stage, else a placeholder. PPO takes the prompts of pairs only
    where data.split or `stages` keeps or puts them there: a reward model scores its own pairs' prompts too surely."""
    named = []
    with suppress(UserError):
        named = [_named(each.source) for each in datasets.open_sources(data, STAGES[stage].reads)
                 if stage != "ppo" or data.split or each.source.stages or each.form.kind == "prompt"]
    if not named:
        return PLACEHOLDERS[stage]
    return named[0] if len(named) == 1 and isinstance(named[0], str) else json.dumps(named)


def _named(source: Source) -> str | dict:
    """A source as written in settings: its path alone where all else is at its default."""
    plain = Source(source.path)
    changed = {f.name: value for f in dataclasses.fields(source)
               if (value := getattr(source, f.name)) != getattr(plain, f.name)}
    return {"path": source.path} | changed if changed else source.path


def _carried(config: object, option: str) -> list[str]:
    """The option and its value, where the run's value was not the default."""
    value, default = value_of(config, option), value_of(type(config)(), option)
    is_usual = value == default or (option == "model.lora.r" and not value)
    return [] if is_usual else [f"--{option}", json.dumps(value) if not isinstance(value, str) else value]
