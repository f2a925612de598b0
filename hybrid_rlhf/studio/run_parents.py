"""Which runs a run was made from, by what its record says. No path in a record is followed: it is compared as text."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

_MODEL_LINE = re.compile(r"model: (.+?); trained: ")  # of the lines that a run begins with (training/announce.py)
_INNER = re.compile(r"/(model|model_ema|checkpoints)(/.*)?$")
MAX_PARENTS, MAX_LENGTH = 20, 300


class Parent(NamedTuple):
    """text: as the record has it. ids: what runs it may be. is_guess: what a run takes that is told nothing else; it
    counts only where there is such a run."""

    text: str
    ids: tuple[str, ...]
    is_guess: bool = False


def parents_of(run: str, record: Mapping, outputs: Path) -> list[Parent]:
    """The models that the run `run` begins with and learns from, as its settings name them, the trained one first."""
    config, facts = _inner(record, "config"), _inner(record, "facts")
    roles, reward = _inner(config, "roles"), _inner(config, "reward")
    role = {name: _inner(roles, name).get("model_name_or_path") for name in roles}
    header = facts.get("header")
    first = next((said.group(1) for line in (header if isinstance(header, list) else [])[:50]
                  if isinstance(line, str) and (said := _MODEL_LINE.match(line))), None)
    given = [_inner(config, "model").get("model_name_or_path"), role.get("actor"), facts.get("base_model"), first]
    named = [*given, *_list(_inner(config, "evaluate").get("models"), is_named=True), role.get("reward"),
             facts.get("reward_model"), role.get("teacher"), role.get("ref"), role.get("critic"),
             *_list(reward.get("models")), _inner(reward, "judge").get("model")]
    roots = _roots(run, config.get("output_dir"), outputs)
    found = {text: Parent(text, _ids(text, roots)) for text in named if isinstance(text, str) and text}
    beside = run.rpartition("/")[0] + "/" if "/" in run else ""
    if not any(isinstance(text, str) for text in given) and "train" in config and record.get("stage") != "sft":
        found["sft"] = Parent("sft", (f"{beside}sft",), is_guess=True)
    is_told = "reward_model" in facts or bool(role.get("reward")) or _has_sources(config, record)
    if "reward" in role and not is_told:
        found["reward"] = Parent("reward", (f"{beside}reward",), is_guess=True)
    return list(found.values())[:MAX_PARENTS]


def shown(run: str, parents: list[Parent], known: Collection[str]) -> list[str]:
    """The ids of those that are runs, and the others' names; `run` itself is none of them."""
    found = []
    for parent in parents:
        place = next((each for each in parent.ids if each in known), None)
        if place is None and not parent.is_guess:
            found.append(parent.text[:MAX_LENGTH])
        elif place is not None and place != run:
            found.append(place)
    return list(dict.fromkeys(found))


def _roots(run: str, output_dir: object, outputs: Path) -> list[str]:
    """What the paths of other runs in a record begin with: the folder of all runs, here and as it was called when the
    run was made, which its own path tells; "" for one made in it."""
    roots = [f"{outputs}/"]
    if isinstance(output_dir, str):
        own = _plain(output_dir)
        if own == run or own.endswith(f"/{run}"):
            roots.append(own[: len(own) - len(run)])
    return roots


def _ids(text: str, roots: list[str]) -> tuple[str, ...]:
    path = _INNER.sub("", _plain(text))
    return tuple(path[len(root):] for root in roots if path.startswith(root) and not path[len(root):].startswith("/"))


def _plain(path: str) -> str:
    return os.path.normpath(os.path.expanduser(path) if path.startswith("~/") else path)


def _has_sources(config: Mapping, record: Mapping) -> bool:
    """Whether the run is told what scores its answers, or needs nothing that does."""
    reward = _inner(config, "reward")
    judge = _inner(reward, "judge")
    return bool(reward.get("functions") or reward.get("models") or reward.get("url") or judge.get("model")
                or judge.get("url") or _inner(config, "environment").get("factory")
                or record.get("stage") in ("distill", "evaluate"))


def _list(value: object, is_named: bool = False) -> list[str]:
    """A text or a list of them; named ones (NAME=PATH) without their names."""
    texts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    texts = [text for text in texts[:MAX_PARENTS] if isinstance(text, str)]
    return [text.partition("=")[2] or text for text in texts] if is_named else texts


def _inner(of: Mapping, name: str) -> Mapping:
    found = of.get(name)
    return found if isinstance(found, Mapping) else {}
