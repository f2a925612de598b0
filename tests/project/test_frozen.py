"""What users rely on: options and their defaults, the Python API, the server's requests, what run.json holds. A change
is made on purpose: `python -m tests.project.test_frozen` writes the files of tests/project/frozen anew, and the commit
says why.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

FROZEN = Path(__file__).parent / "frozen"


def options() -> str:
    """A line for each option and default: the stages that have it so."""
    from hybrid_rlhf import cli
    from hybrid_rlhf.training.registry import STAGES

    found: dict[str, list[str]] = {}
    for stage in STAGES:
        config, _ = cli.read_settings(stage, [])
        for option, value in _flat(dataclasses.asdict(config)):
            found.setdefault(f"{option}: {json.dumps(value, default=str)}", []).append(stage)
    most = len(STAGES)
    return "".join(f"{line}  ({'every stage' if len(names) == most else ', '.join(sorted(names))})\n"
                   for line, names in sorted(found.items()))


def _flat(settings: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def api() -> str:
    """The trainers' signature and their arguments by position, and what they return."""
    import hybrid_rlhf
    from hybrid_rlhf.api import Training

    lines = [f"Training{inspect.signature(Training)}"]
    for name in sorted(hybrid_rlhf._FROM_PYTHON):
        kind = getattr(hybrid_rlhf, name)
        lines += [f"{name}: {kind._OURS}; as in TRL: {kind._ORDER}; models: {', '.join(kind._MODELS) or 'no further'}"]
    lines += [f"Training.{name}{inspect.signature(value) if callable(value) else ''}" for name, value in
              sorted(vars(Training).items()) if not name.startswith("_")]
    return "\n".join(lines) + "\n"


def server() -> str:
    """The fields of what the server reads."""
    from hybrid_rlhf.inference.server import protocol

    bodies = (protocol._ChatBody, protocol._CompletionBody, protocol._ScoreBody)
    schemas = [schema for body in bodies for found in [body.model_json_schema()]
               for schema in (found, *found.get("$defs", {}).values())]
    return "".join(sorted({f"{schema['title']}: {', '.join(schema.get('properties', {}))}\n" for schema in schemas}))


def record() -> str:
    """The keys of run.json, and the commands."""
    from hybrid_rlhf import cli
    from hybrid_rlhf.run.runfile import STATUSES, RunRecord

    keys = [field.name for field in dataclasses.fields(RunRecord)]
    return f"run.json: {', '.join(keys)}\nstatus: {', '.join(STATUSES)}\ncommands: {', '.join(cli.COMMANDS)}\n"


TEXTS = {"options.txt": options, "api.txt": api, "server.txt": server, "record.txt": record}


@pytest.mark.parametrize("name", TEXTS)
def test_what_users_rely_on_is_as_it_was(name):
    assert TEXTS[name]().splitlines() == (FROZEN / name).read_text(encoding="utf-8").splitlines(), (
        "python -m tests.project.test_frozen writes it anew, if that is meant")


if __name__ == "__main__":
    for name, make in TEXTS.items():
        (FROZEN / name).write_text(make(), encoding="utf-8")
