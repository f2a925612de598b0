"""Choose the prompts of an evaluation: all of a source, or its held-out ones if a model was trained on it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from hybrid_rlhf.core.config import check
from hybrid_rlhf.data import collate, datasets
from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.rollout import Prompts
from hybrid_rlhf.run import runfile
from hybrid_rlhf.training.registry import READS

ROWS = ("auto", "all", "held_out")
FEW = 20  # prompts: with fewer, only a very large difference between models shows


def which_rows(rows: str, data: DataConfig, paths: Iterable[str]) -> tuple[str, str]:
    """(rows, why): auto becomes all, or held_out with the reason where a model was trained on one of the sources."""
    if rows != "auto":
        return rows, ""
    for path in paths:
        seen = _trained_on(path)
        shared = next((s.path for s in data.sources if _identity(s.path) in seen), None)
        if shared is not None:
            return "held_out", f"held out, for {path} was trained on {shared}; --evaluate.rows all asks every one"
    return "all", ""


def _trained_on(path: str) -> set[str]:
    """The data sources of a run and of the runs that it started from; empty for a model that is not a run."""
    seen: set[str] = set()
    done: set[str] = set()
    while path and path not in done and (Path(path) / runfile.RUN_FILE).exists():
        record = runfile.read_run(path)
        sources = (record.config.get("data") or {}).get("sources") or []
        seen |= {_identity(source["path"]) for source in sources}
        done.add(path)
        path = record.facts.get("base_model") or ""
    return seen


def _identity(source: str) -> str:
    """A source's absolute path; a name that is not a local path (a hub id) stays as it is."""
    path = Path(os.path.expanduser(source))  # a record has it as the user wrote it
    return str(path.resolve()) if path.exists() else source


def in_common(data: DataConfig, tokenizers: Mapping[str, object], rows: str, limit: int | None, seed: int
              ) -> tuple[dict[str, Prompts], dict]:
    """Model -> prompts in its tokens, those that fit into data.max_prompt_length for all, at most `limit`; and the
    counts of the rows."""
    by_model: dict[str, dict] = {}
    for name, tokenizer in tokenizers.items():
        built = datasets.build(data, READS["ppo"], tokenizer, seed)
        candidates = [*built.held_out, *(built.train if rows == "all" else ())]
        check(bool(candidates), f"none of the {len(built.train)} prompts is held out (data.eval_fraction "
                                f"{data.eval_fraction:g}); raise it, or ask all of them by --evaluate.rows all")
        by_model[name] = {_key(row): row for row in candidates}
    common = [key for key in next(iter(by_model.values())) if all(key in each for each in by_model.values())]
    check(bool(common), "evaluate.models: no prompt fits into data.max_prompt_length for all of them; raise it")
    chosen = common[:limit]
    asked = {name: collate.collate_prompts([each[key] for key in chosen]) for name, each in by_model.items()}
    return asked, built.report


def _key(row: dict) -> str:
    """Key of a prompt with its other columns, whatever the tokenizer; a row that occurs twice is asked once."""
    return json.dumps({k: v for k, v in row.items() if k not in ("prompt_ids", "text")}, sort_keys=True)


def print_selection(count: int, why: str, report: dict) -> None:
    """Print to stderr how many prompts are asked, with a warning where they are few. why: which they are."""
    parts = [f"evaluate: {count} of {report['read']} prompts are asked ({why})", *datasets.drops(report)]
    print("; ".join(parts), *(f"data: {line}" for line in datasets.unread(report)), sep="\n", file=sys.stderr)
    if count < FEW:
        print(f"warning: {count} prompts tell only very large differences between models apart; give {FEW} or more, "
              "better hundreds", file=sys.stderr)
