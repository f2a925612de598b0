"""The API reference as HTML, from the docstrings: python docs/write_api.py [FOLDER] (outputs/api). Needs pdoc.

Modules of the library, of training/ and inference/; warnings (a docstring that cannot be read, a module that cannot be
imported) make the exit code 1.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Triton's kernels need a card, or its interpreter, to be imported; their definitions are in kernels.reference.
LEFT_OUT = tuple(f"!hybrid_rlhf.kernels.{name}" for name in ("triton_attention", "triton_sampling", "cuda"))


def modules() -> list[str]:
    """Modules and packages of the library, under the names that they are imported by. Not its root, which in a checkout
    holds itself (hybrid_rlhf/__init__.py), so that walking it does not end."""
    library = [p for p in sorted((ROOT / "hybrid_rlhf").iterdir()) if p.name != "__init__.py"]
    places = [*library, ROOT / "training", ROOT / "inference"]
    return [f"hybrid_rlhf.{p.stem}" for p in places if p.suffix == ".py" or (p / "__init__.py").exists()]


def write(folder: Path) -> list[str]:
    """The pages below `folder`; returns what pdoc had to say."""
    import pdoc
    import pdoc.render

    sys.path.insert(0, str(ROOT))
    pdoc.render.configure(docformat="google", footer_text="hybrid_rlhf")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pdoc.pdoc(*modules(), *LEFT_OUT, output_directory=folder)
    return [str(w.message) for w in said if w.category in (UserWarning, RuntimeWarning) and "pdoc" in w.filename]


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "outputs" / "api"
    faults = write(folder)
    print(*faults, f"{folder}/index.html", sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
