"""What the page asks of the queue: jobs of all kinds, their output, stopping and resuming."""

from __future__ import annotations

from pathlib import Path

import yaml

from hybrid_rlhf.studio import file_lock
from hybrid_rlhf.studio.exports import export_words
from hybrid_rlhf.studio.job_files import MAKES_RUNS, OUTPUT, SETTINGS, Job, read_output
from hybrid_rlhf.studio.job_settings import (
    RUN_FILE,
    SETTINGS_FILE,
    evaluation,
    free_name,
    new_folder,
    own_settings,
    run_folder,
    settings_text,
)
from hybrid_rlhf.studio.jobs import Jobs
from hybrid_rlhf.studio.named_code import named_code
from hybrid_rlhf.studio.studio import Refused, Route, Studio
from hybrid_rlhf.studio.studio_files import read_json
from hybrid_rlhf.training.registry import STAGES


def routes(studio: Studio, jobs: Jobs) -> list[Route]:
    """The addresses of the queue."""
    add = {"train": _train, "signal": _check_signal, "evaluate": _evaluate, "export": _export}

    def post(_query: dict, body: dict) -> dict:
        kind = body.get("kind")
        if not isinstance(kind, str) or kind not in add:
            raise Refused(400, f"kind is none of {', '.join(add)}")
        with jobs.alone():
            return add[kind](studio, jobs, body)

    return [Route("GET", "/api/jobs", lambda _query, _body: {"jobs": [job.shape() for job in jobs.all()]}),
            Route("POST", "/api/jobs", post),
            Route("GET", "/api/job", lambda query, _body: _output(jobs, query)),
            Route("POST", "/api/job/stop", lambda _query, body: jobs.stop(body.get("id"))),
            Route("POST", "/api/run/stop", lambda _query, body: _stop_run(studio, jobs, body.get("id"))),
            Route("POST", "/api/run/resume", lambda _query, body: _resume(studio, jobs, body))]


def _train(studio: Studio, jobs: Jobs, body: dict) -> dict:
    stage, run = _stage(body), body.get("run")
    folder = new_folder(studio, run)
    _check_free(jobs, run)
    return jobs.add("train", f"{stage}: {run}", [stage, "--config", SETTINGS], stage=stage, run=run,
                    settings=settings_text(body.get("settings", {}), folder))


def _check_signal(studio: Studio, jobs: Jobs, body: dict) -> dict:
    """A check of a run that may be started next: it writes nothing, so a folder that is there is no hindrance."""
    stage, run = _stage(body), body.get("run")
    folder = None if run is None else run_folder(studio, run)
    return jobs.add("signal", f"signal check of {stage}", [stage, "--config", SETTINGS, "--check_signal"], stage=stage,
                    run=run, settings=settings_text(body.get("settings", {}), folder))


def _evaluate(studio: Studio, jobs: Jobs, body: dict) -> dict:
    runs = body.get("runs")
    settings = evaluation(studio, runs, body.get("settings", {}))
    if not all(map(jobs.is_own, runs)):
        _check_confirmed(body, {k: v for k, v in settings.items() if k not in body.get("settings", {})})
    waiting = {job.facts["run"] for job in jobs.all()}
    run = body.get("run") or free_name(studio, "evaluate", waiting)
    folder = new_folder(studio, run)
    _check_free(jobs, run)
    return jobs.add("evaluate", f"evaluation of {', '.join(runs)}"[:200], ["evaluate", "--config", SETTINGS],
                    stage="evaluate", run=run, settings=settings_text(settings, folder))


def _export(studio: Studio, jobs: Jobs, body: dict) -> dict:
    run = body.get("run")
    words, name = export_words(studio, studio.folder(run), body)
    if any(job.facts["name"] == name and job.state in ("queued", "running") for job in jobs.all()):
        raise Refused(409, f"an export called {name} waits or runs already; choose another name", "name")
    return jobs.add("export", f"export of {run}", words, run=run, name=name)


def _check_confirmed(body: dict, settings: object) -> None:
    """Settings that came with a run's folder, which may be somebody else's: what they name is said before it runs."""
    if (named := named_code(settings)) and body.get("is_confirmed") is not True:
        raise Refused(409, f"these settings came with the run, and name {', '.join(named)[:500]}; go on only if you "
                           "know who wrote them", "is_confirmed")


def _resume(studio: Studio, jobs: Jobs, body: dict) -> dict:
    """The run's own settings and folder; what is relative in them counts from where it was started, where that is
    known."""
    run = body.get("id")
    folder = studio.folder(run)
    assert isinstance(run, str)
    with jobs.alone():
        if (job := jobs.of_run(run)) and not _is_ending(job, folder):
            raise Refused(409, f"{run} {'is running' if job.state == 'running' else 'waits'} already")
        if job is None and file_lock.is_held(folder / SETTINGS_FILE):
            raise Refused(409, f"{run} is running, started elsewhere")
        if (read_json(folder / RUN_FILE) or {}).get("status") == "finished":
            raise Refused(409, f"{run} is finished")
        stage, settings = own_settings(folder)
        if stage not in STAGES:
            raise Refused(409, f"{run} is of the stage {stage[:50]!r}, which this release has not")
        if not jobs.is_own(run):
            _check_confirmed(body, _loaded(settings))
        kind = "evaluate" if stage == "evaluate" else "train"
        return jobs.add(kind, f"{stage}: {run}, resumed",
                        [stage, "--config", SETTINGS, "--output_dir", str(folder), "--resume", "auto"],
                        stage=stage, run=run, settings=settings, folder=jobs.folder_of(run))


def _loaded(settings: str) -> object:
    try:
        return yaml.safe_load(settings)
    except (yaml.YAMLError, RecursionError, ValueError):
        raise Refused(409, "the settings of this run cannot be read; start it again as a new run") from None


def _is_ending(job: Job, folder: Path) -> bool:
    """Whether the run has been closed since `job` began, or leaves its model ("stopped", not closed yet), and its
    process is not gone: what is asked now waits for that in the queue."""
    record = read_json(folder / RUN_FILE) or {}
    status, closed = record.get("status"), record.get("finished")
    if job.state != "running" or status == "running":
        return False
    return status == "stopped" if closed is None else isinstance(closed, str) and bool(job.started) and (
        closed > job.started)


def _stop_run(studio: Studio, jobs: Jobs, run: object) -> dict:
    folder = studio.folder(run)
    assert isinstance(run, str)
    if job := jobs.of_run(run):
        return jobs.stop(job.id)
    if file_lock.is_held(folder / SETTINGS_FILE):
        raise Refused(409, f"{run} was started elsewhere, and is stopped there (Ctrl-C)")
    raise Refused(409, f"{run} is not running")


def _output(jobs: Jobs, query: dict) -> dict:
    job, after = jobs.find(query.get("id")), query.get("after")
    if after is not None and not (after.isascii() and after.isdigit() and len(after) < 16):
        raise Refused(400, "after is no number of a byte")
    text, end = read_output(jobs.folder / job.id / OUTPUT, None if after is None else int(after))
    return {"job": job.shape(), "output": text, "next": end}


def _stage(body: dict) -> str:
    stage = body.get("stage")
    if not isinstance(stage, str) or stage not in STAGES:
        raise Refused(400, f"there is no such stage; choose {', '.join(STAGES)}", "stage")
    return stage


def _check_free(jobs: Jobs, run: str) -> None:
    """No run is in another one's folder, and none is started twice: what waits has no folder yet."""
    for job in jobs.all():
        other = job.facts["run"] if job.state in ("queued", "running") and job.facts["kind"] in MAKES_RUNS else None
        if other and (f"{run}/".startswith(f"{other}/") or f"{other}/".startswith(f"{run}/")):
            raise Refused(409, f"{other} is in the queue; choose another name", "run")
