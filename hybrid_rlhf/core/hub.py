"""Sets the model hub's client offline where there is no network: it would retry every file for half a minute."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

TIMEOUT = 3.0  # seconds to wait for a connection


@cache
def stay_offline_if_unreachable() -> None:
    """Set the hub's client to its offline mode where no connection to the hub (or to the proxy) can be opened.

    Offline, downloaded files still load, and anything else fails at once. Checked once per process.
    """
    if _is_offline() or is_reachable():
        return
    os.environ["HF_HUB_OFFLINE"] = "1"  # read by libraries that are not imported yet, and by child processes
    for module in ("huggingface_hub.constants", "datasets.config"):
        if module in sys.modules:
            sys.modules[module].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]  # these two have it


def advice(path: str) -> str:
    """What to give in place of `path`, from which no model can be read."""
    if not _is_offline():
        return "give a folder with config.json, or a hub id"
    return (f"the hub is out of reach: give a folder with config.json, or download it first where there is a network "
            f"(hf download {path})")


def _is_offline() -> bool:
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
               for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def is_reachable() -> bool:
    """Whether a connection to the hub, or to the proxy before it, can be opened; never in offline mode."""
    if _is_offline():
        return False
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
    try:
        socket.create_connection((url.hostname, url.port or (80 if url.scheme == "http" else 443)), TIMEOUT).close()
    except (OSError, ValueError):
        return False
    return True


# -- Addresses that only this machine reaches --------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
