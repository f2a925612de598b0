"""Requests of the page to the queue: start, stop, resume and evaluate runs, export models, read output.

A request becomes a job's command line and settings file. They are only data here; the launcher validates them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

import yaml

from hybrid_rlhf.core.config import to_yaml
from hybrid_rlhf.core.own_files import fresh_path, is_locked
from hybrid_rlhf.studio import run_files
from hybrid_rlhf.studio.exports import EXPORTS, PLAIN_NAME, export_words
from hybrid_rlhf.studio.job import MAKES_RUNS, OUTPUT, SETTINGS, Job, read_output
from hybrid_rlhf.studio.jobs import Jobs
from hybrid_rlhf.studio.runs import find_runs
from hybrid_rlhf.studio.settings_text import check_names, flat, nested
from hybrid_rlhf.studio.studio import Refused, Route, Studio, own_folder, read_json
from hybrid_rlhf.training.registry import STAGES

MAX_LEVELS = 4  # of folders from the outputs to a run
_EVALUATED = ("data.sources", "data.max_prompt_length", "data.raw", "data.split")  # copied to an evaluation
_SCORED_BY, _REWARD_MODEL = ("reward", "environment"), "roles.reward.model_name_or_path"
# options with code or addresses, also in mappings and lists; builtin:NAME is the library's
_TRUSTED = ("reward.functions", "environment.tools", "environment.factory", "reward.judge.url", "reward.url")
_OPTION = re.compile(r"(--)?[a-z_0-9]+(\.[a-z_0-9]+)+|(--)?seed")  # that a fork may change
_PERMISSIONS = ("trust_remote_code", "trust_pickled_weights")


def routes(studio: Studio, jobs: Jobs) -> list[Route]:
    """The routes of the queue."""
    add = {"train": _train, "signal": _check_signal, "evaluate": _evaluate, "export": _export, "replay": _replay}

    def post(_query: dict, body: dict) -> dict:
        with jobs.alone():
            return add[body["kind"]](studio, jobs, body)

    return [Route("GET", "/api/jobs", lambda _query, _body: {"jobs": [job.shape() for job in jobs.all()]}),
            Route("POST", "/api/jobs", post),
            Route("GET", "/api/job", lambda query, _body: _output(jobs, query)),
            Route("POST", "/api/job/stop", lambda _query, body: jobs.stop(body["id"])),
            Route("POST", "/api/run/stop", lambda _query, body: _stop_run(studio, jobs, body["id"])),
            Route("POST", "/api/run/resume", lambda _query, body: _resume(studio, jobs, body)),
            Route("POST", "/api/run/move", lambda _query, body: _move(studio, jobs, body))]


# -- requests --------------------------------------------------------------------------------------------------------


def _train(studio: Studio, jobs: Jobs, body: dict) -> dict:
    stage, run = body["stage"], body["run"]
    folder = new_folder(studio, run)
    _check_free(jobs, run)
    return jobs.add("train", f"{stage}: {run}", [stage, "--config", SETTINGS], stage=stage, run=run,
                    settings=run_settings(body["settings"], folder))


def _check_signal(studio: Studio, jobs: Jobs, body: dict) -> dict:
    """Check the reward signal of a run before it starts. It writes nothing, so the run's folder may exist."""
    stage, run = body["stage"], body.get("run")
    folder = None if run is None else run_folder(studio, run)
    return jobs.add("signal", f"signal check of {stage}", [stage, "--config", SETTINGS, "--check_signal"], stage=stage,
                    run=run, settings=run_settings(body["settings"], folder))


def _evaluate(studio: Studio, jobs: Jobs, body: dict) -> dict:
    runs, chosen = body["runs"], body.get("settings", {})
    settings = evaluation(studio, runs, chosen)
    if not all(map(jobs.is_own, runs)):
        _check_confirmed(body, {name: value for name, value in settings.items() if name not in chosen})
    run = body.get("run") or free_name(studio, "evaluate", {job.facts["run"] for job in jobs.all()})
    folder = new_folder(studio, run)
    _check_free(jobs, run)
    return jobs.add("evaluate", f"evaluation of {', '.join(runs)}"[:200], ["evaluate", "--config", SETTINGS],
                    stage="evaluate", run=run, settings=run_settings(settings, folder))


def _export(studio: Studio, jobs: Jobs, body: dict) -> dict:
    run = body["run"]
    words, name = export_words(studio, studio.folder(run), body)
    if any(job.facts["name"] == name and job.state in ("queued", "running") for job in jobs.all()):
        raise Refused(409, f"an export called {name} waits or runs already; choose another name", "name")
    return jobs.add("export", f"export of {run}", words, run=run, name=name)


def _replay(studio: Studio, jobs: Jobs, body: dict) -> dict:
    """Take a run's steps again and score its rollouts by another reward; or, with a step, make a new run that goes on
    from there with other settings."""
    run, step = body["run"], body.get("step")
    folder = studio.folder(run)
    stage, settings = own_settings(folder)
    if not jobs.is_own(run):
        _check_confirmed(body, yaml.safe_load(settings))
    if step is None:
        return jobs.add("replay", f"replay of {run}", ["replay", str(folder), f"--reward={body['reward']}"], run=run,
                        folder=jobs.folder_of(run))
    words = body["settings"].split()
    if len(words) % 2 or not all(_OPTION.fullmatch(name) for name in words[::2]):
        raise Refused(400, "settings are names and values, such as ppo.kl_coef 0.1", "settings")
    target = f"{run}_fork_{int(step)}"
    place = new_folder(studio, target)
    _check_free(jobs, target)
    changed = [f"--{name.lstrip('-')}={value}" for name, value in zip(words[::2], words[1::2], strict=True)]
    return jobs.add("train", f"{stage}: {target}", ["replay", str(folder), "--fork", str(int(step)), "--output_dir",
                                                    str(place), *changed], stage=stage, run=target,
                    folder=jobs.folder_of(run))


def _resume(studio: Studio, jobs: Jobs, body: dict) -> dict:
    """Resume a run with its settings in its folder. Relative paths in them are relative to where the run was started,
    if that is known."""
    run = body["id"]
    folder = studio.folder(run)
    with jobs.alone():
        if (job := jobs.of_run(run)) and not _is_ending(job, folder):
            raise Refused(409, f"{run} {'is running' if job.state == 'running' else 'waits'} already")
        if job is None and is_locked(folder / run_files.SETTINGS):
            raise Refused(409, f"{run} is running, started elsewhere")
        if (read_json(folder / run_files.RECORD) or {}).get("status") == "finished":
            raise Refused(409, f"{run} is finished")
        stage, settings = own_settings(folder)
        if stage not in STAGES:
            raise Refused(409, f"{run} is of the stage {stage!r}, which this release has not")
        if not jobs.is_own(run):
            _check_confirmed(body, yaml.safe_load(settings))
        kind = "evaluate" if stage == "evaluate" else "train"
        return jobs.add(kind, f"{stage}: {run}, resumed",
                        [stage, "--config", SETTINGS, "--output_dir", str(folder), "--resume", "auto"],
                        stage=stage, run=run, settings=settings, folder=jobs.folder_of(run))


def _is_ending(job: Job, folder: Path) -> bool:
    """Whether the run was closed after `job` started, or is writing its model ("stopped", not closed yet): then a new
    job for it may wait in the queue until the process has ended."""
    record = read_json(folder / run_files.RECORD) or {}
    status, closed = record.get("status"), record.get("finished")
    if job.state != "running" or status == "running":
        return False
    return status == "stopped" if closed is None else bool(job.started) and closed > job.started


def _stop_run(studio: Studio, jobs: Jobs, run: str) -> dict:
    folder = studio.folder(run)
    if job := jobs.of_run(run):
        return jobs.stop(job.id)
    if is_locked(folder / run_files.SETTINGS):
        raise Refused(409, f"{run} was started elsewhere, and is stopped there (Ctrl-C)")
    raise Refused(409, f"{run} is not running")


def _move(studio: Studio, jobs: Jobs, body: dict) -> dict:
    """Rename a run's folder to `name`, or without one delete it. Raises Refused for one that is in use."""
    run, name = body["id"], body.get("name")
    with jobs.alone():
        folder = studio.folder(run)
        if not (folder / run_files.RECORD).is_file():
            raise Refused(404, f"there is no run {run[:100]!r}")
        if jobs.of_run(run) or is_locked(folder / run_files.SETTINGS):
            raise Refused(409, f"{run} is running or waits in the queue; stop it first")
        if inside := [other for other in find_runs(studio.outputs)[0] if other.startswith(f"{run}/")]:
            raise Refused(409, f"{inside[0]} is inside of {run}; move it away first")
        if name is not None:
            target = new_folder(studio, name)
            _check_free(jobs, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(target)
        else:  # out of the list at once, so that no half of a run is shown; with what a killed studio left there
            folder.rename(fresh_path(own_folder(studio, "deleted")))
            shutil.rmtree(studio.home / "deleted")
    studio.news.publish("runs", {})
    return {}


def _output(jobs: Jobs, query: dict) -> dict:
    job, after = jobs.find(query["id"]), query.get("after")
    text, end = read_output(jobs.folder / job.id / OUTPUT, None if after is None else int(after))
    return {"job": job.shape(), "output": text, "next": end}


# -- names and folders of runs ---------------------------------------------------------------------------------------


def run_folder(studio: Studio, run: str) -> Path:
    """The folder for a run, by its id. Raises Refused for an invalid id."""
    parts = run.split("/")
    if len(parts) > MAX_LEVELS or not all(map(PLAIN_NAME.fullmatch, parts)):
        raise Refused(400, "a run's name has letters (a to z), digits, _, - and dots, begins with a letter, a digit or "
                           f"_, and may be in folders, such as demo/ppo (at most {MAX_LEVELS} levels)", "run")
    if parts[0].lower() == EXPORTS:
        raise Refused(400, f"{EXPORTS} is the folder of exported models; choose another name", "run")
    return studio.outputs.joinpath(*parts)


def new_folder(studio: Studio, run: str) -> Path:
    """The folder for a new run. Raises Refused if it exists, or cannot be created there."""
    folder = run_folder(studio, run)
    for above in list(folder.relative_to(studio.outputs).parents)[:-1]:
        place = studio.outputs / above
        if (place / run_files.RECORD).exists():
            raise Refused(409, f"{above} is a run, not a folder of runs; choose another name", "run")
        if os.path.lexists(place) and (place.is_symlink() or not place.is_dir()):
            raise Refused(409, f"{above} is not a folder; choose another name", "run")
    if os.path.lexists(folder):
        raise Refused(409, f"there is a run or folder {run} already; choose another name, or resume it", "run")
    return folder


def free_name(studio: Studio, group: str, taken: Collection[str | None]) -> str:
    """group/1, or the next number without a folder and not in `taken`."""
    return next(name for name in (f"{group}/{number}" for number in count(1))
                if name not in taken and not os.path.lexists(studio.outputs / name))


def _check_free(jobs: Jobs, run: str) -> None:
    """Raises Refused if a queued or running job makes this run, or one inside or around it."""
    for job in jobs.all():
        other = job.facts["run"] if job.state in ("queued", "running") and job.facts["kind"] in MAKES_RUNS else None
        if other and (f"{run}/".startswith(f"{other}/") or f"{other}/".startswith(f"{run}/")):
            raise Refused(409, f"{other} is in the queue; choose another name", "run")


# -- settings --------------------------------------------------------------------------------------------------------


def run_settings(settings: Mapping[str, object], output_dir: Path | None) -> str:
    """Dotted option -> value as YAML. output_dir: of the run; the settings must not change it. Raises Refused or
    UserError if they do, or set one option twice."""
    options = dict(settings)
    if output_dir is not None:
        named = options.pop("output_dir", None)
        if named is not None and Path(str(named)).absolute() != output_dir:
            raise Refused(400, "the run's name says where it goes; leave output_dir out", "output_dir")
        options["output_dir"] = str(output_dir)
    check_names(options)
    return to_yaml(nested(options), allow_unicode=False)


def own_settings(folder: Path) -> tuple[str, str]:
    """The stage of an existing run, and the text of its config.yaml. Raises Refused if they cannot be read."""
    stage = (read_json(folder / run_files.RECORD) or {}).get("stage")
    text = run_files.read_text(folder / run_files.SETTINGS)
    if not stage or not text:
        raise Refused(409, f"{folder.name} has no readable run.json and config.yaml; start it again as a new run")
    return stage, text


def evaluation(studio: Studio, runs: Sequence[str], settings: Mapping[str, object]) -> dict:
    """The settings of an evaluation of `runs`: `settings`, with prompts and rewards, if missing, of the first run that
    was trained on rewards."""
    folders = [studio.folder(run) for run in runs]
    models = [f"{run.replace('=', '_')}={folder}" for run, folder in zip(runs, folders, strict=True)]
    return {"evaluate.models": models, **_evaluation_defaults(folders, settings), **settings}


def _evaluation_defaults(folders: Sequence[Path], settings: Mapping[str, object]) -> dict:
    """Prompts, reward sources and response length of the first run that was trained on rewards; {} without one."""
    records = [read_json(folder / run_files.RECORD) or {} for folder in folders]
    record = next((record for record in records if "reward" in record.get("config", {})), None)
    if record is None:
        return {}
    config, defaults = flat(record["config"]), {}
    if not any(name.startswith(("data.", "evaluate.labels")) for name in settings):
        defaults |= {name: config[name] for name in _EVALUATED if config.get(name) is not None}
        defaults |= _held_out(config, [flat(record.get("config", {})).get("data.eval_fraction") for record in records])
    if not any(name.partition(".")[0] in (*_SCORED_BY, "roles") for name in settings):
        model = config.get(_REWARD_MODEL) or record["facts"].get("reward_model")
        defaults |= {name: record["config"][name] for name in _SCORED_BY if name in record["config"]}
        defaults |= {_REWARD_MODEL: model} if model else {}
    most = next((value for name, value in config.items() if name.endswith(".sampling.max_new_tokens")), None)
    if most is not None and not any("sampling" in name for name in settings):
        defaults["evaluate.sampling.max_new_tokens"] = most
    return defaults


def _held_out(config: dict, fractions: list[float | None]) -> dict:
    """Settings for rows that no run was trained on: data.eval_sources, or the smallest share that a run held out. If a
    run held out none: all rows, which the evaluation reports."""
    if sources := config.get("data.eval_sources"):
        return {"data.sources": sources, "evaluate.rows": "all"}
    least = min((fraction for fraction in fractions if fraction is not None), default=None)
    if least is None:
        return {}
    return {"data.eval_fraction": least} if least > 0 else {"evaluate.rows": "all"}


# -- settings of others ----------------------------------------------------------------------------------------------


def _check_confirmed(body: dict, settings: object) -> None:
    """Require a confirmation of code and addresses in the settings of a run that this studio did not make: they may be
    another person's."""
    if (named := named_code(settings)) and body.get("is_confirmed") is not True:
        raise Refused(409, f"these settings came with the run, and name {', '.join(named)[:500]}; go on only if you "
                           "know who wrote them", "is_confirmed")


def named_code(settings: object) -> list[str]:
    """The code, addresses and permissions in settings (nested, or with dotted names), as texts."""
    named = []
    for name, value in _leaves(settings):
        if not value or str(value).startswith("builtin:"):
            continue
        if name.rpartition(".")[2] in _PERMISSIONS:
            named.append(name)
        elif any(f"{name}.".startswith(f"{option}.") for option in _TRUSTED):
            named.append(f"{name} {value}")
    return named


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Dotted name and value of everything in mappings and lists, in lists of mappings too."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, name)
    else:
        yield name, value
