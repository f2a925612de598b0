"""Launchers: a common end when one process finds a mistake, two hosts, and a hostfile as the guide writes it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.distributed.two_processes import RUNS, argv_of, metrics
from tests.factories.processes import ROOT, TORCHRUN, ended, free_port, launch, start
from tests.factories.tiny import save_tiny

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]  # the first to ask for it waits for `place`


@pytest.mark.slow
def test_when_one_process_finds_a_mistake_all_end_with_its_code_and_one_message(tmp_path):
    """The second process alone cannot see the data; the first would wait for it for half an hour."""
    (tmp_path / "demos.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    script = tmp_path / "one_sees.py"
    script.write_text(f"import os, sys\nif os.environ['RANK'] == '1': os.chdir({str(tmp_path / 'none')!r})\n"
                      "from hybrid_rlhf.cli import main\ncode = main(sys.argv[1:])\nsys.exit(code)\n")
    (tmp_path / "none").mkdir()
    save_tiny(tmp_path / "base")
    done = ended(launch(str(script), "--stage", "sft", "--output_dir", f"{tmp_path}/out", "--model.model_name_or_path",
                        f"{tmp_path}/base", "--data.sources=[{path: demos.jsonl}]", "--data.split", "null",
                        "--data.max_length", "64", folder=tmp_path))
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "demos.jsonl does not exist" in done.stderr
    assert done.stderr.count("exitcode  : 2 ") == 2, done.stderr


def test_the_guide_s_hostfile_is_one_that_deepspeed_s_launcher_reads(tmp_path):
    """The launcher itself needs pdsh or ssh to other machines."""
    from deepspeed.launcher.runner import encode_world_info, fetch_hostfile, parse_inclusion_exclusion

    guide = (ROOT / "docs" / "guide" / "several-gpus.md").read_text()
    lines = re.search(r"\$ cat (\w+)\n((?:\S+ slots=\d+\n)+)\$ deepspeed --hostfile (\w+)", guide)
    assert lines and lines[1] == lines[3]
    (tmp_path / "hostfile").write_text(lines[2])
    pool = fetch_hostfile(str(tmp_path / "hostfile"))
    assert dict(pool) == {"10.0.0.1": 8, "10.0.0.2": 8}
    chosen = parse_inclusion_exclusion(pool, "", "10.0.0.2:0,1")
    assert {host: list(slots) for host, slots in chosen.items()} == {
        "10.0.0.1": list(range(8)), "10.0.0.2": list(range(2, 8))}
    assert encode_world_info(chosen)


def _same_sft(place: Path, where: str) -> None:
    one, other = (metrics(place / name / "sft") for name in ("one", where))
    assert len(other) == 4
    for expected, row in zip(one, other, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=2e-6)


@pytest.mark.slow
def test_two_hosts_are_two_torchruns_that_meet_at_an_address(place):
    """Two network namespaces with a cable between them; where none are permitted, two node groups over loopback."""
    argv = argv_of(place, RUNS, "hosts", 4)["sft"]
    with two_hosts() as hosts:
        meet = ["--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "10.77.0.1" if hosts else "127.0.0.1",
                "--master_port", free_port()]
        nodes = [start([*before, *TORCHRUN, *meet, "--node_rank", str(i), "train.py", *argv], **env)
                 for i, (before, env) in enumerate(hosts or [([], {})] * 2)]
        for done in [ended(node) for node in nodes]:
            assert done.returncode == 0, done.stderr
    _same_sft(place, "hosts")


@pytest.mark.slow
def test_deepspeed_s_own_launcher_starts_the_same_run(place):
    launcher = Path(sys.executable).with_name("deepspeed")
    done = ended(start([str(launcher), "--num_gpus", "2", "--master_port", free_port(), "train.py",
                        *argv_of(place, RUNS, "deepspeed", 4)["sft"]], DS_ACCELERATOR="cpu"))
    assert done.returncode == 0, done.stderr
    _same_sft(place, "deepspeed")


# --- Two hosts on one machine: network namespaces with a cable between them. Needs root and iproute2

NAMES, NETWORK = ("a", "b"), "10.77.0"


@contextmanager
def two_hosts() -> Iterator[list[tuple[list[str], dict[str, str]]] | None]:
    """(words before a command, environment) of each host; the first one's address is 10.77.0.1. None where the system
    permits no namespaces."""
    hosts = [f"hrlhf{os.getpid()}{name}" for name in NAMES]
    cable = [f"v{os.getpid()}{name}" for name in NAMES]

    def ip(*words: str) -> bool:
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0

    try:
        made = shutil.which("ip") and all(ip("netns", "add", host) for host in hosts) and ip(
            "link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for i, (host, end) in enumerate(zip(hosts, cable, strict=True)):
            made = (made and ip("link", "set", end, "netns", host)
                    and ip("-n", host, "addr", "add", f"{NETWORK}.{i + 1}/24", "dev", end)
                    and ip("-n", host, "link", "set", end, "up") and ip("-n", host, "link", "set", "lo", "up"))
        yield [(["ip", "netns", "exec", host], {"GLOO_SOCKET_IFNAME": end})
               for host, end in zip(hosts, cable, strict=True)] if made else None
    finally:
        if shutil.which("ip"):
            for host in hosts:
                ip("netns", "del", host)  # and the cable's end with it
