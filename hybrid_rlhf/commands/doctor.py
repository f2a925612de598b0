"""hybrid-rlhf doctor: what this machine has, what is missing, and the command that fixes it."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch

from hybrid_rlhf import kernels
from hybrid_rlhf.core import accelerator
from hybrid_rlhf.core.compat import TESTED, newer_than_tested
from hybrid_rlhf.core.config import command_flags, parse_command
from hybrid_rlhf.core.memory import free_host_bytes, is_wsl
from hybrid_rlhf.core.options import expanded
from hybrid_rlhf.kernels import cpu, launcher
from hybrid_rlhf.kernels.build import cache_folder

MISSING = 3  # exit code: something that every run needs is missing
FEW_GIB = {"memory": 4, "disk": 10}  # below these a line is a warning: the demo runs, a 1B model does not
# Purpose of each extra of setup.py.
EXTRAS = {"quantize": "4- and 8-bit bases and optimizers", "report": "TensorBoard",
          "gguf": "export for llama.cpp and Ollama"}


@dataclass(frozen=True)
class Finding:
    """One line of the report. state: ok, warning (something is slower or not possible), missing (nothing runs).

    cure: a command or a sentence; empty where nothing needs to be done.
    """

    name: str
    state: str
    detail: str
    cure: str = ""


def examine(*, compile_kernels: bool = True) -> list[Finding]:
    """Every finding, in the order of the report. compile_kernels: build the C++ kernels if they are not cached."""
    dtype = "bfloat16 with fp32 masters" if accelerator.bf16_unit() else "float32"
    return [Finding("Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
            *_packages(), _compiler(), _kernels(compile_kernels),
            Finding("processor", "ok", f"{accelerator.bf16_line()}: model.dtype auto trains in {dtype} on it"),
            *_device(), *_launcher(), _memory(), *_disk()]


def _packages() -> Iterator[Finding]:
    """The declared dependencies, and the extras as one line each."""
    from packaging.requirements import Requirement

    try:
        declared = [Requirement(text) for text in requires("hybrid-rlhf") or []]
    except PackageNotFoundError:
        yield Finding("hybrid-rlhf", "warning", "runs from a folder; its dependencies cannot be told",
                      "pip install -e .")
        return
    for requirement in declared:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _package(requirement, "missing", f'pip install "{requirement.name}{requirement.specifier}"')
    for extra, purpose in EXTRAS.items():
        wanted = [r for r in declared if r.marker and r.marker.evaluate({"extra": extra})
                  and not r.marker.evaluate({"extra": ""})]
        if not wanted:
            yield Finding(f"extra: {extra}", "warning", "not declared by this installation, which is an older one",
                          "pip install -e . (or install the newest release)")
            continue
        packages = [_package(r, "warning", "") for r in wanted]
        is_complete = all(p.state == "ok" for p in packages)
        yield Finding(f"extra: {extra}", "ok" if is_complete else "warning",
                      f"{purpose}: " + ", ".join(f"{p.name} {p.detail}" for p in packages),
                      "" if is_complete else f'pip install "hybrid-rlhf[{extra}]"')


def _package(requirement: object, state: str, cure: str) -> Finding:
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return Finding(requirement.name, state, "not installed", cure)
    if newer_than_tested(requirement.name):
        tested = TESTED[requirement.name]
        return Finding(requirement.name, "warning", f"{installed}, newer than {tested}, the newest tested",
                       f'pip install "{requirement.name}=={tested}" if anything is slow or fails')
    if requirement.specifier.contains(installed, prereleases=True):
        return Finding(requirement.name, "ok", installed)
    return Finding(requirement.name, state, f"{installed}, outside the tested range {requirement.specifier}", cure)


def _compiler() -> Finding:
    if compiler := shutil.which(os.environ.get("CXX", "c++").split()[0]):
        return Finding("C++ compiler", "ok", compiler)
    return Finding("C++ compiler", "warning", "none on PATH", "apt install g++ (or your system's package); without it "
                                                              "sampling on the CPU takes the slower torch path")


def _kernels(compile_kernels: bool) -> Finding:
    folder = cache_folder()
    if not compile_kernels and not cpu.is_built():  # those of another Python or torch may lie beside
        return Finding("CPU kernels", "warning", f"not compiled yet (cache: {folder})",
                       "hybrid-rlhf doctor compiles them; so does the first run, in about a minute")
    name = kernels.ops_for("cpu").name
    if name.startswith("reference"):
        return Finding("CPU kernels", "warning", f"{name}, cache: {folder}",
                       "fix what the line says, then run doctor again")
    return Finding("CPU kernels", "ok", f"{name}, cache: {folder}")


def _device() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        yield Finding("GPU", "warning", f"none that can be used, runs take the CPU: {accelerator.why_no_card()}",
                      "" if built else "with an NVIDIA card, install a CUDA build: pip install torch --index-url "
                                       "https://download.pytorch.org/whl/cu130")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        card = torch.device("cuda", index)
        capability = accelerator.capability(card)
        lacking = accelerator.lacks_kernels(card)
        has_bf16 = capability is None or capability >= accelerator.AMPERE
        yield Finding(f"GPU {index}", "missing" if lacking else "ok" if has_bf16 else "warning",
                      f"{torch.cuda.get_device_name(index)}, {_gib(free)} of {_gib(total)} free"
                      + (f", capability {capability[0]}.{capability[1]}" if capability else "")
                      + ("" if has_bf16 else "; bfloat16 by emulation only, so model.dtype auto is float16")
                      + (f"; {lacking[0]}" if lacking else ""), lacking[1] if lacking else "")
    if is_wsl():
        yield Finding("WSL2", "warning", f"runs take at most {accelerator.WSL_SHARE:.0%} of the memory that is free on "
                      "the card when they start: beyond it Windows lends the computer's own, many times slower, and "
                      "Linux none",
                      "close Windows programs that use the card; in NVIDIA's control panel, 'CUDA - Sysmem Fallback "
                      "Policy: Prefer No Sysmem Fallback' makes Windows say no as well")


def _launcher() -> Iterator[Finding]:
    """Whether Triton can launch kernels: tried on the GPU; if a CUDA build of torch sees none, by installed tools."""
    if torch.cuda.is_available():
        name = kernels.ops_for("cuda").name
        is_slow = name.startswith("reference")
        yield Finding("GPU kernels", "warning" if is_slow else "ok", name,
                      "fix what the line says; until then generation takes torch's slower path" if is_slow else "")
    elif torch.version.cuda:
        for what, cure in launcher.missing_tools():
            yield Finding("GPU kernels", "warning",
                          f"{what} is missing: generation on a card takes torch's slower path", cure)


def _memory() -> Finding:
    free = free_host_bytes()
    if free is None:
        return Finding("memory", "warning", "the system does not tell what is free")
    is_little = free < FEW_GIB["memory"] * 2**30
    return Finding("memory", "warning" if is_little else "ok", f"{_gib(free)} free, {os.cpu_count()} cores",
                   "close other programs; --plan says what a run needs" if is_little else "")


def _disk() -> Iterator[Finding]:
    hub = Path(expanded(os.environ.get("HF_HOME") or "~/.cache/huggingface"))
    for name, place in (("disk: here", Path.cwd()), ("disk: model cache", hub), ("disk: kernels", cache_folder())):
        existing = next(p for p in (place, *place.parents) if p.exists())
        free = shutil.disk_usage(existing).free
        is_little, is_locked = free < FEW_GIB["disk"] * 2**30, not os.access(existing, os.W_OK)
        cure = ("" if not (is_little or is_locked) else
                f"{existing} cannot be written: choose another (HF_HOME, HYBRID_RLHF_CACHE, --output_dir)" if is_locked
                else "free some space; a checkpoint of full fine-tuning holds 12 bytes or more a weight")
        yield Finding(name, "warning" if is_little or is_locked else "ok", f"{_gib(free)} free at {place}", cure)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def show(findings: list[Finding]) -> None:
    """Print the table on stdout, and the remedies below it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("", "", "found"):
        table.add_column(title, overflow="fold")
    marks = {"ok": ("ok", "green"), "warning": ("note", "yellow"), "missing": ("MISSING", "bold red")}
    for finding in findings:
        table.add_row(Text(*marks[finding.state]), Text(finding.name), Text(finding.detail))
    console = Console(highlight=False)
    console.print(table)
    cures = [f for f in findings if f.cure]
    if cures:
        console.print("\nwhat would fix it:")
    for finding in cures:
        console.print(Text(f"  {finding.name}: {finding.cure}"), soft_wrap=True)  # a command is copied whole
    num_missing = sum(f.state == "missing" for f in findings)
    console.print(f"\n{num_missing} missing: nothing runs before that is fixed" if num_missing
                  else "\neverything that a run needs is here")


def main(argv: list[str] | None = None) -> int:
    """The entry point; returns 0, or 3 where something that every run needs is missing. Raises UserError."""
    flags = command_flags("doctor", __doc__)
    flags.add_argument("--json", action="store_true", help="print the findings as JSON")
    flags.add_argument("--no_compile", action="store_true", help="do not compile the C++ kernels")
    options = parse_command(flags, argv)
    findings = examine(compile_kernels=not options.no_compile)
    if options.json:
        print(json.dumps([asdict(f) for f in findings], indent=1))
    else:
        show(findings)
    return MISSING if any(f.state == "missing" for f in findings) else 0
