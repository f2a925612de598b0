"""run.json: what a run was, through which stages find each other and a finished stage is left alone."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hybrid_rlhf import __version__
from hybrid_rlhf.config import UserError, check
from hybrid_rlhf.distributed import is_main

RUN_FILE, FORMAT = "run.json", 1
OWN = {RUN_FILE, "config.yaml", "metrics.jsonl", "samples.jsonl", "checkpoints", "model", "model.tmp", "adapter",
       "report.md", "plots"}  # what a run may leave in its folder


@dataclasses.dataclass
class RunRecord:
    """The contents of run.json. status: running, finished, stopped or failed; facts: whatever a later stage needs."""

    output_dir: str
    stage: str
    status: str = "running"
    command: str = ""
    config: dict = dataclasses.field(default_factory=dict)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    facts: dict = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    started: float = 0.0
    seconds: float = 0.0
    format: int = FORMAT

    @property
    def is_finished(self) -> bool:
        return self.status == "finished"

    def finish(self, metrics: dict[str, float], *, tokenizer, **facts: object) -> None:  # noqa: ANN001
        """The run ended well; facts must be JSON."""
        self.status, self.metrics, self.seconds = "finished", metrics, time.time() - self.started
        template = tokenizer.chat_template or ""
        self.facts = {"tokenizer": tokenizer_hash(tokenizer),
                      "chat_template": hashlib.sha256(template.encode()).hexdigest(), **facts}
        self.write()

    def write(self) -> None:
        """Atomically, by the main process."""
        if is_main():
            path = Path(self.output_dir) / RUN_FILE
            text = json.dumps({k: v for k, v in dataclasses.asdict(self).items() if k != "output_dir"}, indent=1)
            beside = path.with_suffix(".tmp")
            beside.write_text(text + "\n", encoding="utf-8")
            os.replace(beside, path)


def start(output_dir: str, stage: str, config: object, command: str) -> RunRecord:
    """Claim `output_dir` for a run of `stage` and write config.yaml and run.json; or the record of a finished run.

    A finished run with the same settings is returned as it is (and says so on stderr) unless config.resume is
    "never". Raises UserError for a folder that holds something else, another stage, or a finished run with other
    settings.
    """
    import sys

    resume = getattr(config, "resume", "auto")
    check(resume in ("auto", "never"), f"resume is {resume!r}; choose auto or never")
    folder, settings = Path(output_dir), _plain(config)
    check(not folder.exists() or folder.is_dir(), f"output_dir {output_dir} is a file")
    strangers = sorted(p.name for p in folder.iterdir() if p.name not in OWN) if folder.exists() else []
    if folder.exists() and not (folder / RUN_FILE).exists():
        check(not list(folder.iterdir()), f"output_dir {output_dir} holds something else "
                                          f"({next(iter(folder.iterdir())).name if strangers else 'files'}); "
                                          "choose a new or empty folder")
    if (folder / RUN_FILE).exists():
        old = read_run(output_dir)
        check(old.stage == stage, f"output_dir {output_dir} holds a {old.stage} run; choose another for {stage}")
        if old.is_finished and resume == "auto":
            changed = sorted(_changes(old.config, settings))
            check(not changed, f"output_dir {output_dir} holds a finished run with other settings "
                               f"({', '.join(changed[:5])}); choose another output_dir or give --resume never")
            print(f"{output_dir}: this {stage} run is finished; nothing to do (--resume never runs it again)",
                  file=sys.stderr)
            return old
    return _begin(folder, stage, settings, command)


def _begin(folder: Path, stage: str, settings: dict, command: str) -> RunRecord:
    import yaml

    record = RunRecord(str(folder), stage, command=command, config=settings, started=time.time(),
                       versions=_versions())
    if is_main():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("metrics.jsonl", "samples.jsonl"):
                (folder / name).unlink(missing_ok=True)
            (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write to output_dir {folder}: {error.strerror}") from error
        record.write()
    return record


def _plain(config: object) -> dict:
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _changes(old: dict, new: dict, prefix: str = "") -> set[str]:
    """Dotted names whose values differ, where it matters to the result."""
    names: set[str] = set()
    for key in old.keys() | new.keys():
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            names |= _changes(a, b, f"{prefix}{key}.")
        elif a != b and f"{prefix}{key}" not in ("resume", "output_dir", "report_to"):
            names.add(f"{prefix}{key}")
    return names


def read_run(folder: str | Path) -> RunRecord:
    """The record in `folder`. Raises UserError if there is none or it is not one of ours."""
    path = Path(folder) / RUN_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        check(found["format"] <= FORMAT, f"{path} was written by a newer release; update hybrid_rlhf")
        return RunRecord(output_dir=str(folder), **found)
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no run: it has no {RUN_FILE}") from error
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"{path} is not a run record of hybrid_rlhf") from error


def require_finished(folder: str | Path, stage: str) -> RunRecord:
    """The finished run of `stage` in `folder`; UserError for another stage or a run that did not finish."""
    record = read_run(folder)
    check(record.stage == stage, f"{folder} holds a {record.stage} run, but a {stage} run is needed")
    check(record.is_finished, f"the {stage} run in {folder} is {record.status}, not finished; run it again first")
    return record


def tokenizer_hash(tokenizer) -> str:  # noqa: ANN001
    """sha256 over what decides a text's ids: the fast tokenizer's own serialization, or the vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = [tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id]
    return hashlib.sha256((text + json.dumps(special)).encode()).hexdigest()


def _versions() -> dict[str, str]:
    found = {"hybrid_rlhf": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "deepspeed", "peft", "datasets"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
