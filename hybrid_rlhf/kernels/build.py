"""Compiles the C++ kernels once per source, flags, torch and processor, into a cache that processes share."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

import torch

from hybrid_rlhf.core import accelerator
from hybrid_rlhf.core.options import expanded
from hybrid_rlhf.core.own_files import remove_folder, take_lock, write_file
from hybrid_rlhf.kernels.ops import KernelsUnavailableError

_log = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-std=c++20", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
         "-ffp-contract=fast", "-Wno-psabi")
_DIGEST = "sha256"  # of the library, in a file beside it
# Compiled in a subprocess: torch's loader needs ninja on PATH, prints, and numbers the names of loaded modules.
_COMPILE = """
import sys
from torch.utils.cpp_extension import load
name, folder, flags, *sources = sys.argv[1:]
load(name, sources, extra_cflags=flags.split(), extra_ldflags=["-fopenmp"], build_directory=folder,
     is_python_module=False)
"""


def cache_folder() -> Path:
    """Where compiled kernels live: $HYBRID_RLHF_CACHE/kernels, or ~/.cache/hybrid_rlhf/kernels."""
    return Path(expanded(os.environ.get("HYBRID_RLHF_CACHE") or "~/.cache/hybrid_rlhf"), "kernels")


def load_extension(name: str, sources: Sequence[Path], headers: Sequence[Path] = ()) -> ModuleType:
    """The extension module `name`, compiled on first use; later calls and other processes load the compiled one.

    Raises KernelsUnavailableError where it cannot be compiled, written or loaded, with the reason in one line.
    """
    folder = cache_folder() / f"{name}-{_fingerprint([*sources, *headers])}"
    library = folder / f"{name}.so"
    try:
        if _is_intact(library):
            with _removed_if_broken(folder):
                return _imported(name, library)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with take_lock(folder.with_suffix(".lock")):
            if not _is_intact(library):  # another process may have built it meanwhile
                _build(name, sources, folder)
        return _imported(name, library)
    except OSError as error:
        raise KernelsUnavailableError(f"the folder {folder.parent} cannot be used: {error}; "
                                      "HYBRID_RLHF_CACHE names another") from error
    except ImportError as error:
        raise KernelsUnavailableError(f"{library} cannot be loaded: {error}") from error


def can_load(name: str, sources: Sequence[Path], headers: Sequence[Path] = ()) -> bool:
    """Whether the module is built, or there is a compiler for it; nothing is compiled."""
    compiler = shutil.which(os.environ.get("CXX", "c++").split()[0])
    return compiler is not None or (cache_folder() / f"{name}-{_fingerprint([*sources, *headers])}").exists()


def is_built(name: str, sources: Sequence[Path], headers: Sequence[Path] = ()) -> bool:
    """Whether the module is built, so that loading it compiles nothing."""
    return _is_intact(cache_folder() / f"{name}-{_fingerprint([*sources, *headers])}" / f"{name}.so")


def _is_intact(library: Path) -> bool:
    """Whether there is a library that is as it was built: loading a truncated one crashes the process. One without a
    digest beside it is of an earlier release."""
    digest = library.parent / _DIGEST
    if not library.is_file() or not digest.exists():
        return library.is_file()
    return digest.read_bytes() == _digest(library)


def _digest(library: Path) -> bytes:
    return hashlib.sha256(library.read_bytes()).hexdigest().encode()


@contextmanager
def _removed_if_broken(folder: Path) -> Iterator[None]:
    """Within the block a library that does not load is removed, so that the next start builds it again."""
    try:
        yield
    except ImportError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _fingerprint(files: Sequence[Path]) -> str:
    """A hash of all that the compiled code depends on (-march=native: of the processor's flags too), 16 hex digits."""
    parts = [" ".join(FLAGS), torch.__version__, sys.implementation.cache_tag, platform.machine(), accelerator.flags()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _build(name: str, sources: Sequence[Path], folder: Path) -> None:
    """Compile beside `folder` and rename it: no process ever sees half a build."""
    compiler = shutil.which(os.environ.get("CXX", "c++").split()[0])
    if compiler is None:
        raise KernelsUnavailableError(f"no C++ compiler: {os.environ.get('CXX', 'c++')} is not on PATH")
    _log.warning("compiling the C++ kernels for this machine into %s (once, about a minute)", folder)
    work = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder.parent))
    try:
        command = [sys.executable, "-c", _COMPILE, name, str(work), " ".join(FLAGS), *map(str, sources)]
        done = subprocess.run(command, env=_environment(compiler), capture_output=True, text=True, check=False)
        if done.returncode or not (work / f"{name}.so").exists():
            raise KernelsUnavailableError(f"{compiler} failed: {_reason(done.stdout + done.stderr)}")
        write_file(work / _DIGEST, _digest(work / f"{name}.so"))
        if os.path.lexists(folder):  # a damaged one, or a part of one
            remove_folder(folder)
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _environment(compiler: str) -> dict[str, str]:
    """Our environment, with this Python's programs (ninja) on PATH, and the compiler that was found."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {"CXX": compiler} | os.environ | {"PATH": path}


def _reason(output: str) -> str:
    """The most informative line of a failed build."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error: " in line), lines[-1] if lines else "it said nothing")[:300]


def _imported(name: str, library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, library, loader=ExtensionFileLoader(name, str(library)))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
