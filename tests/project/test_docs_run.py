"""The commands of README and docs, executed in one folder with the files that they name; training is cut to two steps.

Blocks marked `needs: gpu|hub|hosts` are parsed only (test_docs.py). `make` is asked what it would do: test_journeys.py
runs the demo, test_packaging.py installs.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_rlhf import cli
from tests.project.docs_blocks import FIRST_STEPS, ROOT, documents_folder, shell_blocks

pytestmark = pytest.mark.slow

RUNNABLE = [b for b in shell_blocks() if not b.needs]
SHORT = ["--train.max_steps=2", "--train.per_device_train_batch_size=4"]
SAMPLES = {"ppo": "ppo", "grpo": "ppo", "process_grpo": "ppo", "online_dpo": "online", "rejection": "rejection",
           "distill": "distill", "evaluate": "evaluate"}
PARTS = ("sft", "reward", "ppo")


def cut(argv: list[str]) -> list[str]:
    """A stage's command line with what makes it short; questions that only print, and an evaluation that samples
    nothing, stay as they are."""
    if {"--help", "--print_config"} & set(argv) or ("--evaluate.labels" in argv and "--evaluate.models" not in argv):
        return argv
    stage = argv[argv.index("--stage") + 1]
    short = [] if stage == "evaluate" else SHORT
    if stage in SAMPLES:
        section = SAMPLES[stage]
        short = [*short, f"--{section}.sampling.max_new_tokens=8", "--data.max_prompt_length=64"]
    return [*argv, *short]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The fixtures with finished runs in outputs/{sft,reward,ppo}, made by README's commands, and in outputs/demo."""
    with documents_folder(tmp_path_factory.mktemp("docs")) as folder:
        readme = [w for b in RUNNABLE if b.page == FIRST_STEPS for w in b.commands if "--stage" in w]
        for words in readme:
            assert cli.main(cut(words[1:])) == 0, words
        dpo = [w for b in RUNNABLE for w in b.commands if "outputs/dpo" in w]
        assert cli.main(cut(dpo[0][2:])) == 0
        for name in PARTS:
            shutil.copytree(f"outputs/{name}", f"outputs/demo/{name}")
        yield folder


def run(words: list[str], monkeypatch) -> None:
    """One command, in this process where that is what it would do."""
    program, rest = words[0], words[1:]
    if program.endswith("python"):
        program, rest = rest[0], rest[1:]
    if program == "inference/chat":
        rest = ["chat", *rest]
    if program == "make":
        subprocess.run(["make", "-n", "-C", str(ROOT), *rest], check=True, capture_output=True)
    elif program != "pip":
        if rest[0] == "chat":
            monkeypatch.setattr(sys, "stdin", io.StringIO("Name a red fruit.\n"))
        if rest[0] == "export":
            shutil.rmtree(rest[rest.index("--output_dir") + 1], ignore_errors=True)
        if rest[0] == "init":
            Path(rest[rest.index("--file") + 1]).unlink(missing_ok=True)
        done = exit_code(cut(rest) if "--stage" in rest else rest)
        assert done == 0, words


def exit_code(argv: list[str]) -> int:
    try:
        return cli.main(argv)
    except SystemExit as stop:  # --help and --print_config
        return stop.code


def served(block, folder: Path) -> None:
    """A block that starts a server: it answers the block's other commands, and stops in good order."""
    first = next(w for w in block.commands if "serve" in w)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    server = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *first[1:], "--port", "0"], cwd=folder,
                              env=environment, stderr=subprocess.PIPE, text=True)
    try:
        port = port_of(server)
        for words in (w for w in block.commands if w[0] == "curl"):
            asked = [re.sub(r"localhost:8000", f"127.0.0.1:{port}", w) for w in words]
            answer = subprocess.run(["curl", "-sS", "-m", "240", *asked[1:]], capture_output=True, text=True,
                                    check=True)
            is_stream = json.loads(words[words.index("-d") + 1]).get("stream")
            assert ("data: [DONE]" if is_stream else '"usage"') in answer.stdout, answer.stdout
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=240)
    assert server.returncode == 0


def port_of(server: subprocess.Popen) -> str:
    """Where it listens, once it says so."""
    said = ""
    for line in server.stderr:
        if found := re.search(r"^serving .* at http://[^:]+:(\d+)$", line):
            return found.group(1)
        said += line
    raise AssertionError(said)


@pytest.mark.parametrize("block", RUNNABLE, ids=lambda b: b.name)
def test_the_commands_do_what_they_say(block, place, monkeypatch) -> None:
    if any("curl" in w for w in block.commands) and not shutil.which("curl"):
        pytest.skip("curl is not installed")
    if any("--gguf" in w for w in block.commands):
        pytest.importorskip("gguf")
    if any("--model.load_in_4bit" in w for w in block.commands):
        pytest.importorskip("bitsandbytes")
    if any("serve" in w for w in block.commands):
        served(block, place)
    for words in (w for w in block.commands if not {"serve", "curl"} & set(w)):
        run(words, monkeypatch)
    for words in block.commands:
        for option, value in itertools.pairwise(words):
            if option == "--output_dir" and not {"--print_config", "--plan", "init"} & set(words):
                assert any(Path(value).iterdir()), f"{words} left nothing"
