"""Which releases are installed: the oldest that setup.py admits lack what later ones added."""

from __future__ import annotations

import transformers
from packaging.version import Version


def transformers_before(release: str) -> bool:
    return Version(transformers.__version__) < Version(release)
