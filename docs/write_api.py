"""The API reference as HTML, from the docstrings: python docs/write_api.py [FOLDER] (outputs/api). Needs pdoc.

Modules of the library, of training/ and inference/; warnings (a docstring that cannot be read, a module that cannot be
imported) make the exit code 1.
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Triton's kernels need a card, or its interpreter, to be imported; their definitions are in kernels.reference.
LEFT_OUT = tuple(f"!hybrid_rlhf.kernels.{name}"
                 for name in ("triton_attention", "triton_fused", "triton_sampling", "triton_trial", "cuda"))
# A NamedTuple's constructor carries its fields' annotations as text, which pdoc looks up in another module than their
# own; the page shows the text.
_OF_A_NAMED_TUPLE = re.compile(r"annotation ForwardRef\(.*\) for [\w.]+\.__init__")


def modules() -> list[str]:
    """What pdoc is to walk: not the root, which in a checkout holds itself (hybrid_rlhf/__init__.py) and has no end;
    and the modules of a package whose __all__ would hide them, one by one."""
    found = []
    for path in [*sorted((ROOT / "hybrid_rlhf").iterdir()), ROOT / "training", ROOT / "inference"]:
        start = path / "__init__.py"
        if start.exists() and "__all__" in start.read_text(encoding="utf-8"):
            found += [f"hybrid_rlhf.{path.name}.{p.stem}" for p in sorted(path.iterdir())
                      if (p.suffix == ".py" and p != start) or (p / "__init__.py").exists()]
        elif start.exists() or (path.suffix == ".py" and path.stem != "__init__"):
            found.append(f"hybrid_rlhf.{path.stem}")
    return [*found, *LEFT_OUT]


def write(folder: Path) -> list[str]:
    """The pages below `folder`; returns what pdoc had to say."""
    import pdoc
    import pdoc.render

    sys.path.insert(0, str(ROOT))
    pdoc.render.configure(docformat="google", footer_text="hybrid_rlhf")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pdoc.pdoc(*modules(), output_directory=folder)
    texts = [str(w.message) for w in said if w.category in (UserWarning, RuntimeWarning) and "pdoc" in w.filename]
    return [text for text in texts if not _OF_A_NAMED_TUPLE.search(text)]


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "outputs" / "api"
    faults = write(folder)
    print(*faults, f"{folder}/index.html", sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
