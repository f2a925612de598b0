"""Checks whether Triton can launch a kernel here. It compiles its launcher with the system's C compiler and Python.h at
first use, so a machine that runs torch well may not run our kernels.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path


def missing_tools() -> list[tuple[str, str]]:
    """(what Triton's launcher needs and is missing, how to install it), in Triton's own order of search."""
    missing = []
    named = os.environ.get("CC")
    if not any(map(shutil.which, [named] if named is not None else ["gcc", "clang"])):
        missing.append((f"the C compiler of CC={named}" if named is not None else "a C compiler (gcc or clang)",
                        "apt install gcc (or your system's package)"))
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme  # Debian's, where Triton looks beside it too
    if not (Path(sysconfig.get_paths(scheme)["include"]) / "Python.h").exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        missing.append((f"Python.h of Python {version}",
                        f"apt install python{version}-dev (or your system's package of Python's headers)"))
    return missing


def why_no_launch() -> str | None:
    """Launch a kernel of one number on the current card; returns what went wrong, in one line, or None.

    Out of memory is raised: it is not about Triton.
    """
    import torch

    from hybrid_rlhf.kernels.triton_trial import put_seven

    try:
        if put_seven() == 7:
            return None
        reason = "a kernel that writes one number wrote another"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton's compiler, its linker and the driver raise errors without a common class
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    if missing := missing_tools():
        reason = "; ".join(f"{what} is missing: {cure}" for what, cure in missing)
    return reason
