"""Reward functions that raise, hang, crash, answer nonsense or change what is around them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fault_tries.attempt import Group, Try, expect
from fault_tries.product import GRPO, JUDGE, PAID, Ended, command, finished, refused, same_run, status_of, take

SIGNATURE = "def bad(prompts, completions, completion_ids, answer, tags, **rest):\n"
CHANGES = {  # what a function does before it returns zeros
    "reverses all lists": "for each in (prompts, completions, completion_ids, answer, tags): each.reverse()",
    "rewrites messages": "prompts[0][0]['content'] = completions[0][0]['content'] = 'x'",
    "changes a column": "answer[:] = ['longer than it was'] * len(answer)",
    "sets torch's default dtype": "import torch; torch.set_default_dtype(torch.float64)",
    "switches gradients off": "import torch; torch.set_grad_enabled(False)",
    "changes the working directory": "import os; os.makedirs('elsewhere', exist_ok=True); os.chdir('elsewhere')",
    "forks, and the child comes back": "import os; pid = os.fork(); os.waitpid(pid, 0) if pid else None",
    "prints a megabyte": "print('x' * 2**20)",
}
ANSWERS = {
    "nan": "return [float('nan')] * len(completions)", "strings": "return ['1.0'] * len(completions)",
    "None": "return None", "too few": "return [0.0]", "nested": "return [[0.0]] * len(completions)",
    "raises KeyError": "raise KeyError('no such answer')", "raises SystemExit(0)": "raise SystemExit(0)",
    "raises MemoryError": "raise MemoryError",
    "a message of many lines": "raise ValueError('a\\nTraceback of mine\\nerror: b')",
    "recursion": "return bad(prompts, completions, completion_ids, answer, tags)"}
CRASHES = {"os._exit(7)": "import os; os._exit(7)", "SIGSEGV": "import os; os.kill(os.getpid(), 11)"}
HANGS = {"a busy loop": "while True: pass", "sleep": "import time; time.sleep(60)",
         "a lock": "import threading\nlock = threading.Lock(); lock.acquire(); lock.acquire()"}
HANGS_IN_C = {"compiled code": "sum(range(10**11))", "a child": "import subprocess; subprocess.run(['sleep', '40'])"}


def run(body: str, isolate: bool, timeout: float = 10.0) -> Ended:
    """A GRPO run of two steps by a function with this body, beside an honest one."""
    text = SIGNATURE + textwrap.indent(f"{body}\nreturn [0.0] * len(completions)\n", "    ")
    Path("pay.py").write_text(text + JUDGE, encoding="utf-8")
    return command(*GRPO, *PAID, "--reward.timeout", str(timeout), "--reward.isolate", str(isolate).lower())


def changes_nothing(body: str, isolate: bool, place: Path) -> None:
    take(place, "base", "paid.jsonl")
    finished(run(body, isolate))
    same_run(place, "paid")


def is_refused(body: str, isolate: bool, place: Path, message: str = "", timeout: float = 10.0) -> None:
    take(place, "base", "paid.jsonl")
    refused(run(body, isolate, timeout), "reward source bad", message)
    expect(status_of("run") == "failed", f"run.json says {status_of('run')}")
    expect(not Path("run/model").exists(), "a model was exported")


def tries_of(act: Callable, bodies: dict[str, str], ways: tuple[bool, ...], **settings: object) -> list[Try]:
    return [Try(f"{name}{', isolated' * isolate}", partial(act, body, isolate, **settings))
            for name, body in bodies.items() for isolate in ways]


REWARDS = Group(
    "reward functions that change their inputs or the process, raise, crash, answer nonsense",
    "changed: the same bits as beside a function that changes nothing. Otherwise exit code 2, one line with the "
    "source; run.json says failed",
    tries_of(changes_nothing, CHANGES, (False, True)) + tries_of(is_refused, ANSWERS, (False,))
    + tries_of(is_refused, CRASHES, (True,)))
TIMEOUT = Group(
    "reward functions that hang",
    'exit code 2 within the limit, one line with "no answer within"; run.json says failed; no process is left',
    tries_of(is_refused, HANGS, (False, True), message="no answer within 0.3 s", timeout=0.3)
    + tries_of(is_refused, HANGS_IN_C, (True,), message="no answer within 0.3 s", timeout=0.3))
