"""Two hosts on one machine: network namespaces with a cable between them. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

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
