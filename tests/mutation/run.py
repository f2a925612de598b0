"""Mutation testing with mutmut: `python tests/mutation/run.py [PART ..] [--survivors]`, `make mutation`.

Every part has the tests that can kill its mutants: a mutant is tried in a process forked from one that has imported
torch, our package and these tests already, and of the tests only those are run that reach the changed function. A
module with more than --mutants mutants is tried with a sample of that size, the same for the same seed. The working
tree is not touched: mutmut works on a copy in `mutants/`, which goes when a part is done.

Writes outputs/mutation/PART.json, {module: {mutant: verdict}}, and PART.diff, what survived; prints the table of
docs/results/mutation.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import libcst as cst
from mutmut import __main__ as mutmut
from mutmut import configuration
from mutmut.mutation import file_mutation
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.runners.harness import PytestRunner
from mutmut.state import state
from mutmut.stats import status_by_exit_code
from mutmut.utils.format_utils import get_mutant_name
from mutmut.workers.isolation import ForkServerRunner

FOUND = Path("outputs/mutation")
DEAD = ("killed", "timeout", "segfault")
# mutmut leaves decorated functions alone, for a decorator may act when its function is defined, and every copy is one
# more. These do not; without them no estimator of advantages would be tried.
_HARMLESS = {"torch.no_grad()", "property", "contextmanager"}
# What is imported when tests run: seconds for every mutant, unless the process that theirs are forked from has it.
_LATE = ("deepspeed", "peft", "torch._dynamo", "torch._inductor", "torch.utils.checkpoint", "transformers.quantizers",
         "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto")


class Part(NamedTuple):
    """Modules (patterns of paths) and the tests that they are tried with."""

    modules: list[str]
    tests: list[str]


PARTS = {
    "algorithms": Part(
        ["hybrid_rlhf/algorithms/*.py"],
        ["tests/algorithms", "tests/rewards/test_reward_signal.py"]),
    "tensors": Part(
        ["hybrid_rlhf/core/tensors.py"],
        ["tests/core/test_tensors.py", "tests/data/test_batches.py", "tests/engine/train/test_micro_batches.py",
         "tests/algorithms/test_advantages.py", "tests/algorithms/test_likelihood.py"]),
    "chat": Part(
        ["hybrid_rlhf/data/chat.py"],
        ["tests/data/test_added_turns.py", "tests/data/test_batches.py", "tests/data/test_chat_template.py",
         "tests/data/test_stage_rows.py", "tests/data/test_tool_rows.py", "tests/data/test_trl_templates.py",
         "tests/data/test_turns.py"]),
    "accumulate": Part(
        ["hybrid_rlhf/engine/train/accumulate.py"],
        ["tests/engine/train/test_accumulate.py", "tests/engine/train/test_micro_batches.py"]),
    "record": Part(
        ["hybrid_rlhf/rollout/*record.py", "hybrid_rlhf/rollout/dynamic_sampling.py"],
        ["tests/rollout/test_record.py"]),
    "rollout": Part(
        ["hybrid_rlhf/rollout/best_of_n.py", "hybrid_rlhf/rollout/collect.py", "hybrid_rlhf/rollout/old_logprobs.py",
         "hybrid_rlhf/rollout/episodes.py", "hybrid_rlhf/rollout/episodes.py", "hybrid_rlhf/rollout/episodes.py"],
        ["tests/rollout/test_collect.py", "tests/rollout/test_environment_episodes.py",
         "tests/rollout/test_episode_player.py", "tests/rollout/test_episodes.py",
         "tests/rollout/test_old_logprobs.py"]),
    "roles": Part(
        ["hybrid_rlhf/roles/*.py"],
        ["tests/roles/test_critic_start.py", "tests/roles/test_policy_module.py", "tests/roles/test_role_handles.py",
         "tests/roles/test_scoring.py", "tests/roles/test_sharing.py", "tests/roles/test_teacher_reads.py",
         "tests/trainers/test_offline_trainers.py", "tests/trainers/test_trainers.py"]),
}


def _decorators(function: cst.FunctionDef) -> list[str]:
    return [cst.Module([]).code_for_node(each.decorator) for each in function.decorators]


def mutate_decorated_functions() -> None:
    """Has mutmut mutate functions under decorators that may be had twice; the copies go without them."""
    visitor, skip = file_mutation.MutationVisitor, file_mutation.MutationVisitor._skip_node_and_children
    arrange = file_mutation.function_trampoline_arrangement

    def skipped(self: object, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef) and node.decorators and set(_decorators(node)) <= _HARMLESS:
            return False
        return skip(self, node)

    def arranged(function: cst.FunctionDef, mutants: object, class_name: str | None) -> tuple:
        declared, (trampoline, *copies), assigned, names = arrange(function, mutants, class_name)
        if set(_decorators(function)) <= _HARMLESS:
            copies = [copy.with_changes(decorators=[]) for copy in copies]
        return declared, [trampoline, *copies], assigned, names

    visitor._skip_node_and_children = skipped
    file_mutation.function_trampoline_arrangement = arranged


def run_fast_tests_first(most: float) -> None:
    """Has a mutant tried with the fastest of the tests that reach it, up to `most` seconds of them: a survivor has
    stood those of its own module, and not an hour of runs. The tests without a mutant are run once, for these times."""
    submit = ForkServerRunner.submit

    def fast_first(self: ForkServerRunner, mutant_name: str, tests: list[str], *limits: float) -> None:
        seconds = state().duration_by_test
        named = (test for test in tests if "\\" not in test)  # of an escaped byte, which pytest does not find again
        tests = sorted(named, key=lambda test: seconds[test])
        within = [test for test, total in zip(tests, accumulate(seconds[test] for test in tests), strict=True)
                  if total <= most]
        submit(self, mutant_name, within or tests[:1], *limits)

    ForkServerRunner.submit = fast_first
    ForkServerRunner.run_clean_tests = lambda self, tests: 0


def import_early() -> None:
    """Has the process that those of all mutants are forked from import what tests import as they run."""
    warm_up = PytestRunner.warm_up

    def warmed(self: PytestRunner) -> None:
        warm_up(self)
        for name in _LATE:
            importlib.import_module(name)

    PytestRunner.warm_up = warmed


def sampled(most: int, seed: int) -> list[str]:
    """The names of the mutants to be tried: of each module all, or `most` of them."""
    names = []
    for path in sorted(mutmut.walk_mutatable_files()):
        found = file_mutation.mutate_file_contents(str(path), path.read_text()).mutant_names
        found = [get_mutant_name(path, name) for name in found]
        names += found if len(found) <= most else random.Random(f"{seed} {path}").sample(found, most)
    return names


def earlier(name: str) -> dict[str, dict[str, str]]:
    """{module: {mutant: verdict}} of the last run of a part."""
    return json.loads((FOUND / f"{name}.json").read_text())


def run_part(name: str, most: int, seed: int, seconds: float, is_second: bool) -> None:
    """One part in this process; a second run tries what survived the first. SystemExit where its tests fail without a
    mutant."""
    part = PARTS[name]
    configuration._config = replace(
        configuration.config(), only_mutate=part.modules, pytest_add_cli_args_test_selection=part.tests)
    mutate_decorated_functions()
    run_fast_tests_first(seconds)
    import_early()
    shutil.rmtree("mutants", ignore_errors=True)
    known = earlier(name) if is_second else {}
    left = [key for found in known.values() for key, verdict in found.items() if verdict not in (*DEAD, "not tried")]
    names = left or sampled(most, seed)
    try:
        mutmut._run(names, 1)
        write_found(name, set(names), known)
    finally:
        shutil.rmtree("mutants", ignore_errors=True)  # the tests of the code's form would read it too


def verdict_of(code: int | None) -> str:
    """mutmut's word for an exit code; 255, where pytest could not begin, is no timeout, as mutmut has it."""
    return "error" if code == 255 else status_by_exit_code[code]


def write_found(name: str, tried: set[str], verdicts: dict[str, dict[str, str]]) -> None:
    FOUND.mkdir(parents=True, exist_ok=True)
    with (FOUND / f"{name}.diff").open("w") as survived:
        for path in sorted(mutmut.walk_mutatable_files()):
            data = SourceFileMutationData(path=path)
            data.load()
            found = verdicts.setdefault(str(path), {})
            found |= {key: verdict_of(code) if key in tried else found.get(key, "not tried")
                      for key, code in data.exit_code_by_key.items()}
            for key, verdict in found.items():
                if verdict not in (*DEAD, "not tried"):
                    print(f"# {key}: {verdict}\n{get_diff_for_mutant(key, path=path)}", file=survived)
    (FOUND / f"{name}.json").write_text(json.dumps(verdicts, indent=1) + "\n")
    print(table())


def table() -> str:
    """What was found of all parts so far, for docs/results/mutation.md."""
    lines = ["| module | mutants | tried | killed | survived |", "|---|---|---|---|---|"]
    totals = Counter()
    for name in PARTS:
        for path, found in (earlier(name) if (FOUND / f"{name}.json").exists() else {}).items():
            counts = Counter("killed" if verdict in DEAD else verdict for verdict in found.values())
            tried = counts.total() - counts["not tried"]
            row = {"mutants": len(found), "tried": tried, "killed": counts["killed"], "left": tried - counts["killed"]}
            totals.update(row)
            lines += [f"| `{path.removeprefix('hybrid_rlhf/')}` | {' | '.join(map(str, row.values()))} |"] * bool(found)
    return "\n".join([*lines, f"| all | {' | '.join(map(str, totals.values()))} |"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="default: all")
    parser.add_argument("--mutants", type=int, default=150, help="the most of one module")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=5, help="of tests that a mutant is tried with, at most")
    parser.add_argument("--survivors", action="store_true", help="again with those that survived the last run")
    options = parser.parse_args()
    parts = options.parts or list(PARTS)
    if len(parts) == 1:
        run_part(parts[0], options.mutants, options.seed, options.seconds, options.survivors)
        return 0
    settings = ["--mutants", str(options.mutants), "--seed", str(options.seed), "--seconds", str(options.seconds),
                *["--survivors"] * options.survivors]
    # A process each: mutmut keeps what it knows of one set of tests.
    return max(subprocess.run([sys.executable, __file__, part, *settings]).returncode for part in parts)


if __name__ == "__main__":
    sys.exit(main())
