"""List exported models (folders below outputs/exports) with their checks and commands to use them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from zipfile import ZipFile

from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from hybrid_rlhf.studio.job import OUTPUT, Job, read_output
from hybrid_rlhf.studio.jobs import Jobs
from hybrid_rlhf.studio.studio import Refused, Route, Studio, read_json

EXPORTS = "exports"  # folder below the outputs, without runs
CHECKED = "reloaded in a fresh process: "  # prefix of the line in which commands/export.py reports its comparison
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def routes(studio: Studio, jobs: Jobs) -> list[Route]:
    async def file(request: Request) -> Response:
        name, part = request.query_params["name"], request.query_params.get("file", "")  # without one all of them
        path = studio.outputs / EXPORTS / name / part
        is_there = path.is_file() if part else path.is_dir()
        if not (PLAIN_NAME.fullmatch(name) and PLAIN_NAME.fullmatch(part or name) and is_there
                and os.path.realpath(path) == str(path)):
            raise Refused(404, f"there is no file {part[:100]!r} in the export {name[:100]!r}")
        headers = {"x-content-type-options": "nosniff"}
        if part:
            return FileResponse(path, filename=part, headers=headers)
        headers["content-disposition"] = f'attachment; filename="{name}.zip"'
        return StreamingResponse(zipped(path), media_type="application/zip", headers=headers)

    return [Route("GET", "/api/exports", lambda _query, _body: {"exports": exports(studio, jobs.all())}),
            Route("GET", "/api/export/file", file, is_raw=True)]


def export_words(studio: Studio, folder: Path, body: dict) -> tuple[list[str], str]:
    """The command line of `hybrid-rlhf export` for the run in `folder`, and the export's name. Raises Refused for a
    name that is taken."""
    name, gguf = body["name"], body.get("gguf")
    if not PLAIN_NAME.fullmatch(name):
        raise Refused(400, "a name has letters (a to z), digits, _, - and dots, and begins with a letter, a digit or _",
                      "name")
    target = studio.outputs / EXPORTS / name
    if os.path.lexists(target):
        raise Refused(409, f"there is an export called {name} already; choose another name", "name")
    words = ["export", "--model", str(folder), "--output_dir", str(target)]
    return [*words, *(["--gguf", gguf] if gguf else []), *(["--ollama"] if body.get("ollama") else [])], name


def exports(studio: Studio, jobs: Iterable[Job]) -> list[dict]:
    """All exports, newest first. run, checks: known only for exports made by a job."""
    home = studio.outputs / EXPORTS
    if not home.is_dir():
        return []
    finished = [job for job in jobs if job.facts["kind"] == "export" and job.state == "done"]
    rows = []
    for entry in os.scandir(home):
        if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
            continue
        when, folder = entry.stat().st_mtime, Path(entry.path)
        job = next((job for job in finished if job.facts["name"] == entry.name and _is_of(job, when)), None)
        card = folder / "README.md"
        rows.append((when, {
            "name": entry.name, "run": job.facts["run"] if job else None, "folder": str(folder),
            "files": _files(folder), "checks": _checks(studio.home / "jobs" / job.id / OUTPUT) if job else [],
            "commands": _commands(folder), "card": card.read_text("utf-8", "replace") if card.is_file() else None}))
    return [row for _, row in sorted(rows, key=lambda pair: -pair[0])]


def _is_of(job: Job, when: float) -> bool:
    """Whether a folder last changed at `when` was written by the job, and not later under the same name."""
    if not job.started or not job.finished:
        return False
    start, end = (datetime.fromisoformat(moment).timestamp() for moment in (job.started, job.finished))
    return start - 1 <= when <= end + 1


def _files(folder: Path) -> list[dict]:
    return [{"name": path.name, "bytes": path.stat().st_size} for path in sorted(folder.iterdir())
            if path.is_file() and not path.is_symlink()]


class _Sink(list):
    """A file for zipfile that keeps what is written until it is sent."""

    def write(self, data: bytes) -> int:
        self.append(bytes(data))
        return len(data)

    def flush(self) -> None: ...


def zipped(folder: Path) -> Iterator[bytes]:
    """The files of a folder as one ZIP file, in parts as they are read; weights do not compress, so nothing is."""
    sink = _Sink()
    with ZipFile(sink, "w") as archive:
        for name in [file["name"] for file in _files(folder)]:
            with archive.open(name, "w", force_zip64=True) as inside, (folder / name).open("rb") as source:
                while part := source.read(2**20):
                    inside.write(part)
                    yield b"".join(sink)
                    sink.clear()
    yield b"".join(sink)


def _checks(output: Path) -> list[str]:
    """The lines about checks in the output of an export."""
    lines = [line.strip() for line in read_output(output, 0)[0].splitlines()]
    return [line for line in lines if line.startswith(CHECKED)]


def _commands(folder: Path) -> list[dict]:
    """{"title", "text"} of commands to use the export, by its files."""
    names, place = {file["name"] for file in _files(folder)}, shlex.quote(str(folder))
    gguf = next((name for name in sorted(names) if name.endswith(".gguf")), None)
    kinds = (read_json(folder / "config.json") or {}).get("architectures") or [""]
    is_reward = isinstance(kinds, list) and any("SequenceClassification" in str(kind) for kind in kinds)
    commands = []
    if "config.json" in names:
        commands.append({"title": "transformers", "text": _with_transformers(folder, is_reward)})
        if not is_reward:
            commands.append({"title": "chat in a terminal", "text": f"hybrid-rlhf chat --model {place}"})
            commands.append({"title": "serve (OpenAI's API)", "text": f"hybrid-rlhf serve --model {place}"})
    if "Modelfile" in names:
        name = shlex.quote(folder.name.lower())
        commands.append({"title": "Ollama", "text": f"ollama create {name} -f {place}/Modelfile\nollama run {name}"})
    if gguf:
        commands.append({"title": "llama.cpp", "text": f"llama-cli -m {shlex.quote(str(folder / gguf))} -cnv"})
    return commands


def _with_transformers(folder: Path, is_reward: bool) -> str:
    kind = "AutoModelForSequenceClassification" if is_reward else "AutoModelForCausalLM"
    lines = [f"from transformers import {kind}, AutoTokenizer", "", f"folder = {str(folder)!r}",
             f'model = {kind}.from_pretrained(folder, dtype="auto")',
             "tokenizer = AutoTokenizer.from_pretrained(folder)"]
    if is_reward:
        return "\n".join([*lines, 'inputs = tokenizer("a prompt and its answer", return_tensors="pt")',
                          "print(model(**inputs).logits)"])
    return "\n".join([*lines, 'inputs = tokenizer("Hello", return_tensors="pt")',
                      "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))"])
