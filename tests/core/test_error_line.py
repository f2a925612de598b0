"""Every command says what is wrong in one line that cannot steer the terminal, and exits with 2."""

from __future__ import annotations

import gc
import os
import resource

import pytest

from hybrid_rlhf import cli
from hybrid_rlhf.cli import main

BAD = "no\x1b[2J\nsuch\u202e"


@pytest.mark.parametrize("words", [
    ["--stage", BAD], ["chat", "--model", BAD], ["serve", "--model", BAD, "--port", "0"],
    ["export", "--model", BAD, "--output_dir", "out"], ["doctor", f"--{BAD}"],
    ["init", "--goal", "sft", "--data", BAD, "--model", "m", "--card", "cpu", "--output_dir", "out"]],
    ids=lambda words: words[0])
def test_what_is_wrong_is_one_line_without_control_characters(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ") and "\u241b[2J" in lines[-1] and not list(tmp_path.iterdir())
    assert not any("\x1b" in line or "\u202e" in line for line in lines)
    assert gc.get_threshold()[0] < 10_000  # the start's is put back


def test_a_process_that_runs_out_of_file_descriptors_says_so_in_one_line(monkeypatch, capfd):
    def leak(_argv) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
        held = []
        while True:
            held.append(os.fdopen(os.open(os.devnull, os.O_RDONLY)))

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(cli, "_train", leak)
    try:
        assert main([]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert capfd.readouterr().err == ("error: Too many open files (/dev/null); raise their number (ulimit -n 65536) or "
                                      "find what leaves files open, such as a reward function, and the same command "
                                      "goes on from the last checkpoint\n")
