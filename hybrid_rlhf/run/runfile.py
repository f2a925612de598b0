"""run.json, the record of a run, by which stages find each other and a finished stage is not run again.

It has facts, never a path to a run's own files: its model is always its model/ folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO, ClassVar

from hybrid_rlhf import __version__
from hybrid_rlhf.core import chat_runs, own_files
from hybrid_rlhf.core.config import UserError, check, to_yaml
from hybrid_rlhf.core.distributed import barrier, gather_over_ranks, is_main, print_main
from hybrid_rlhf.core.own_files import take_lock
from hybrid_rlhf.core.strict_json import plain, to_json
from hybrid_rlhf.export.model_card import write_card
from hybrid_rlhf.report.summary import ANSWERS, METRICS, REPORT, SAMPLES
from hybrid_rlhf.report.trackers import check_trackers
from hybrid_rlhf.run import checkpoint, process_count, resume

RUN_FILE, SETTINGS_FILE, FORMAT = "run.json", "config.yaml", 1
STATUSES = ("running", "finished", "stopped", "failed")
ROWS_FOLDER = "rows"  # in output_dir: data given from Python, written before the run begins
TRACKERS = "trackers"  # in output_dir: files of wandb and other trackers, which create links
_locks: dict[Path, BinaryIO] = {}  # folder -> the open file with this process's lock


@dataclasses.dataclass
class RunRecord:
    """The contents of run.json.

    status: one of STATUSES. config: the run's settings. metrics: the last step's and the final evaluation's; a number
    that was not finite is None. facts: what later stages need: tokenizer and chat_template (sha256 each), base_model,
    data (counts of rows), score_statistics (mean, std; of a reward run), header (its first lines); where the run was
    stopped or failed, model_step, the step of its exported model, and num_steps, its planned steps. started, finished:
    UTC, ISO 8601. seconds: from start to end, summed over the processes that resumed it. error: why it failed. code:
    sha256 of the files of reward functions, tools and environments. resumes_from: not in the file: the checkpoint from
    which this process resumes.
    """

    resumes_from: ClassVar[Path | None] = None
    _clock: ClassVar[float] = 0.0  # monotonic: the wall clock may be changed during a run

    output_dir: str
    stage: str
    status: str = "running"
    command: str = ""
    config: dict = dataclasses.field(default_factory=dict)
    metrics: dict = dataclasses.field(default_factory=dict)
    facts: dict = dataclasses.field(default_factory=dict)
    versions: dict = dataclasses.field(default_factory=dict)
    started: str = ""
    finished: str | None = None
    seconds: float = 0.0
    error: str | None = None
    code: dict = dataclasses.field(default_factory=dict)
    format: int = FORMAT

    @property
    def is_finished(self) -> bool:
        return self.status == "finished"

    @property
    def left_early(self) -> str:
        """For a run that was stopped or failed and left a model: which one, as words after "the run"; else ""."""
        if self.facts.get("model_step") is None or self.status not in ("stopped", "failed"):
            return ""
        of = chat_runs.model_of(self.stage, self.facts, self.config, self.output_dir)
        return f"is not finished ({self.status}): its model is that of {of}"

    @property
    def cure(self) -> str:
        """What to do where its model is needed and not there."""
        return chat_runs.cure(self.stage, self.config, self.output_dir)

    def finish(self, metrics: dict[str, float], *, tokenizer, **facts: object) -> None:  # noqa: ANN001
        """Write the record of a run that ended well, and its model card; facts must be JSON. tokenizer: None where it
        had none. Every process returns after the record is written, as others read it next."""
        self.describe(metrics, tokenizer, **facts)
        self.close("finished")
        barrier()

    def describe(self, metrics: dict[str, float], tokenizer, **facts: object) -> None:  # noqa: ANN001
        """Set metrics and facts of the exported model, and write its model card."""
        self.metrics = metrics
        hashes = {} if tokenizer is None else {"tokenizer": tokenizer_hash(tokenizer),
                                               "chat_template": template_hash(tokenizer)}
        self.facts = {"header": self.facts.get("header", []), **hashes, **facts}
        model = Path(self.output_dir) / "model"
        if is_main() and model.is_dir():
            write_card(model, Path(self.output_dir).resolve().name, dataclasses.asdict(self))

    def close(self, status: str, error: str | None = None) -> None:
        """Record that the run ended with `status`, write the record and release the lock."""
        self.status, self.error, self.finished = status, error, now()
        if self._clock:
            clock = time.monotonic()
            self.seconds, self._clock = round(self.seconds + clock - self._clock, 3), clock
        try:
            self.write()
        finally:
            release(Path(self.output_dir))

    def write(self) -> None:
        """Write run.json atomically, in the main process."""
        if not is_main():
            return
        path = Path(self.output_dir)
        contents = {k: v for k, v in dataclasses.asdict(self).items() if k != "output_dir"}
        own_files.write_file(path / RUN_FILE, to_json(contents, indent=1) + "\n")


def finished(output_dir: str | Path, stage: str, config: object, tell: Callable = print_main) -> RunRecord | None:
    """The run in `output_dir` that finished with the same settings and is not run again; a line to `tell` says so.

    None where there is something to run. Writes no file, so that a recipe can call it before it loads anything and
    claim the folder (`start`) after all checks of its input. Raises UserError as `start` does.
    """
    folder, wanted, settings = Path(output_dir), getattr(config, "resume", "auto"), plain(config)
    check_trackers(settings.get("report_to") or [])
    old = _existing(folder)
    check(old is not None or wanted in ("auto", "never"), f"resume is {wanted!r}, but output_dir {output_dir} holds no "
                                                          "run; choose auto or never")
    if old is None:
        return None
    check(old.stage == stage, f"output_dir {output_dir} holds a {old.stage} run; choose another folder for {stage}")
    if wanted == "never":
        return None
    for path, known in old.code.items():
        check(code_of(settings).get(path, known) == known,
              f"{path} has changed since the run in output_dir {output_dir}; choose another output_dir, or give "
              "--resume never to run it again")
    if not old.is_finished or wanted != "auto":
        path = resume.find(folder, wanted)
        if path is not None:
            resume.check_fits(path, settings)
        return None
    changed = resume.changes(old.config, settings)
    if changed and resume.can_go_on(folder, changed, old.config, settings):
        return None
    is_same = not changed or resume.is_shared_otherwise(folder, changed)
    check(is_same, f"output_dir {output_dir} holds a finished run with other settings ({', '.join(changed[:5])}); "
                   f"{resume.instead(folder, stage, changed)}, or give --resume never to run it again")
    for model in map(old.facts.get, ("base_model", "reward_model")):
        started_from = run_at(model) if model else None
        check(not started_from or (started_from.finished or "") <= (old.finished or ""),
              f"{model} was trained again after the run in output_dir {output_dir}; choose another output_dir, or give "
              "--resume never to run it again")
    tell(f"{output_dir}: this {stage} run is finished; nothing to do (--resume never runs it again)")
    return old


def start(output_dir: str | Path, stage: str, config: object, command: str) -> RunRecord:
    """Claim `output_dir` for a run of `stage`: write run.json and config.yaml; or return the record of a finished run.

    A run that finished with the same settings is returned unchanged (is_finished) unless config.resume is "never". One
    that did not finish resumes from its newest complete checkpoint (resumes_from), or from the one that config.resume
    names, or begins again where there is none. Lines on stderr say which. Every process calls it. Raises UserError for
    a folder with other files, another stage's run, or a run with other settings, for one that cannot be written, for a
    checkpoint that this number of processes cannot resume from, and for trackers (config.report_to) that are missing.
    """
    folder, settings = Path(output_dir), plain(config)
    done = finished(output_dir, stage, config)
    if done is not None:
        return done
    old = _existing(folder)
    path = None
    if old is not None and is_main():
        path = resume.find(folder, getattr(config, "resume", "auto"), print_main, is_thorough=True)
    resumes_from = gather_over_ranks(str(path) if path else None)[0]
    if resumes_from is not None:
        return _resume(old, Path(resumes_from), settings, command)
    if old is not None:
        how = "finished" if old.is_finished else f"unfinished ({old.status})"
        print_main(f"{output_dir}: the {how} {stage} run found here is started again from the beginning")
    return _begin(folder, stage, settings, command)


def _resume(record: RunRecord, path: Path, settings: dict, command: str) -> RunRecord:
    """Reopen the run's record, to resume from the checkpoint `path`."""
    facts = resume.check_fits(path, settings)
    print_main(f"{record.output_dir}: the {record.stage} run found here goes on after step {facts['step']}, from "
               f"{path.name}")
    others = process_count.note(facts, settings)
    if others:
        print_main(others)
    other = [f"{k} {v}, not {facts['versions'][k]}" for k, v in versions().items() if facts["versions"].get(k, v) != v]
    if other:
        print_main(f"warning: the checkpoint was made with another release ({'; '.join(other)}): the run may differ "
                   "from an uninterrupted one")
    record.status, record.error, record.finished, record.command = "running", None, None, command
    record.config, record.versions, record.resumes_from, record._clock = settings, versions(), path, time.monotonic()
    if is_main():
        claim(Path(record.output_dir), SETTINGS_FILE)
        own_files.clear_unfinished(Path(record.output_dir))
        record.write()
        if path.parent.name != checkpoint.BEST:
            checkpoint.clear(path.parent, after=facts["step"])
        _write_settings(Path(record.output_dir), settings)
    return record


def _existing(folder: Path) -> RunRecord | None:
    """The run in `folder`, None for a new or empty folder; UserError for other files, or no permission to write."""
    above = next(p for p in (folder.absolute(), *folder.absolute().parents) if os.path.exists(p))
    check(above.is_dir(), f"output_dir {folder}: {above} is a file; give another folder")
    check(os.access(above, os.W_OK | os.X_OK),
          f"cannot write to output_dir {folder}: no right to write in {above}; give another folder")
    if not folder.exists():
        return None
    if os.path.lexists(folder / RUN_FILE):
        own_files.check_inside(folder, (TRACKERS,))
        return read_run(folder)
    strangers = sorted(p.name for p in folder.iterdir() if p.name != ROWS_FOLDER and not own_files.is_unfinished(p.name)
                       and (p.name != SETTINGS_FILE or p.stat().st_size))  # empty: locked by a run that begins
    check(not strangers, f"output_dir {folder} holds something else ({', '.join(strangers[:3])}) and no run; choose a "
                         "new or empty folder")
    own_files.check_inside(folder)  # last, as a folder that is not ours may be very large
    return None


def _begin(folder: Path, stage: str, settings: dict, command: str) -> RunRecord:
    """A new record in `folder`. run.json is written right after the lock, and marks the folder as ours."""
    record = RunRecord(str(folder), stage, command=command, config=settings, started=now(), versions=versions(),
                       code=code_of(settings))
    record._clock = time.monotonic()
    if is_main():
        folder.mkdir(parents=True, exist_ok=True)
        claim(folder, SETTINGS_FILE)
        record.write()
        own_files.clear_unfinished(folder)
        for name in (METRICS, SAMPLES, ANSWERS, REPORT):
            (folder / name).unlink(missing_ok=True)
        for where in (resume.FOLDER, f"{resume.FOLDER}/{checkpoint.BEST}"):
            checkpoint.clear(folder / where)
        _write_settings(folder, settings)
    return record


def code_of(settings: dict) -> dict[str, str]:
    """Path -> sha256 of each file that reward.functions or environment names: changed rewards, tools or environments
    make another run."""
    environment = settings.get("environment") or {}
    factory = environment.get("factory") or []
    options = [settings.get("reward", {}).get("functions") or [], environment.get("tools") or [],
               list(factory.values()) if isinstance(factory, dict) else factory]
    files = {text.rpartition(":")[0] for named in options for text in ([named] if isinstance(named, str) else named)}
    return {name: hashlib.sha256(Path(name).read_bytes()).hexdigest()
            for name in sorted(files) if name.endswith(".py") and Path(name).is_file()}


def _write_settings(folder: Path, settings: dict) -> None:
    (folder / SETTINGS_FILE).write_text(to_yaml(settings), encoding="utf-8")  # not replaced: the lock is on it


def now() -> str:
    """UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def read_run(folder: str | Path) -> RunRecord:
    """The record in `folder`. Raises UserError if it is missing, not a run record, or written by a newer release."""
    path = Path(folder) / RUN_FILE
    check(is_run(folder), f"{folder} holds no run: it has no {RUN_FILE}")
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        check(contents["format"] <= FORMAT,
              f"{path} was written by a newer release (format {contents['format']}); update hybrid_rlhf")
        return RunRecord(output_dir=str(folder), **contents)
    except (OSError, ValueError, LookupError, TypeError) as error:  # such as another user's, which may not be read
        raise UserError(f"{path} is not a run record of hybrid_rlhf, or is damaged; "
                        "give another folder, or run the stage again") from error


def is_run(folder: str | Path) -> bool:
    """Whether `folder` holds a run."""
    return (Path(folder) / RUN_FILE).exists()


def run_at(folder: str | Path) -> RunRecord | None:
    """The record in `folder`; None where there is none. Raises UserError as `read_run` does."""
    return read_run(folder) if is_run(folder) else None


def require_finished(folder: str | Path, stage: str) -> RunRecord:
    """The run of `stage` in `folder`, finished, or ended early with a model (a line says so); UserError for no run,
    another stage, or a run without a model."""
    record = read_run(folder)
    check(record.stage == stage, f"{folder} holds a {record.stage} run, but a finished {stage} run is needed")
    check(record.is_finished or record.left_early,
          f"the {stage} run in {folder} is not finished ({record.status}); {record.cure}")
    if record.left_early:
        _log_once(f"note: the {stage} run in {folder} {record.left_early}")
    return record


@cache
def _log_once(text: str) -> None:
    print_main(text)


def difference(actor: RunRecord, other: RunRecord) -> str | None:
    """Why two runs turn the same conversation into different token ids: "tokenizers" or "chat templates" differ; None
    if neither."""
    return next((what for fact, what in (("tokenizer", "tokenizers"), ("chat_template", "chat templates"))
                 if actor.facts.get(fact) != other.facts.get(fact)), None)


def tokenizer_hash(tokenizer) -> str:  # noqa: ANN001
    """sha256 of everything that determines a text's ids and its end tokens; not padding or truncation, which calls set.

    Fast tokenizers: their own serialization; others: class and vocabulary.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("padding", "truncation")}
    else:
        rules = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    rules["ends"] = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()


def template_hash(tokenizer) -> str:  # noqa: ANN001
    """sha256 of the chat template's text ("" where there is none; several by name as JSON)."""
    template = tokenizer.chat_template or ""
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def versions() -> dict[str, str]:
    """The releases that a run depends on, by name."""
    releases = {"hybrid_rlhf": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "deepspeed", "peft", "datasets"):
        try:
            releases[name] = version(name)
        except PackageNotFoundError:
            releases[name] = "not installed"
    return releases


# -- lock of a folder --------------------------------------------------------------------------------------------------


def claim(folder: Path, name: str) -> None:
    """Lock `folder` by its file `name`, created where it is missing. UserError where another process has it."""
    release(folder)
    try:
        _locks[folder.absolute()] = take_lock(folder / name, 0)
    except TimeoutError:
        raise UserError(f"output_dir {folder}: another process is at this run; wait for its end, or choose another "
                        "output_dir") from None


def release(folder: Path) -> None:
    """Release the lock, if this process has it."""
    file = _locks.pop(folder.absolute(), None)
    if file is not None:
        file.close()
