"""Check that a run reads plain-text prompts in the form that its parent runs were trained on (data.raw)."""

from __future__ import annotations

import sys
from pathlib import Path

from hybrid_rlhf.core.distributed import is_main
from hybrid_rlhf.data import datasets
from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.data.sources import Reads
from hybrid_rlhf.run import runfile


def print_other_form(path: str, data: DataConfig, reads: Reads) -> None:
    """Print a line on stderr where the run at `path`, or of the model at `path`, had another data.raw than `data`."""
    run = next((p for p in (Path(path), Path(path).parent) if (p / runfile.RUN_FILE).exists()), None)
    other = None if run is None else (runfile.read_run(run).config.get("data") or {}).get("raw")
    if other not in (None, data.raw) and is_main() and datasets.has_plain_prompts(data, reads):
        print(f"note: {run} was trained with data.raw {str(other).lower()} and this run has {str(data.raw).lower()}: "
              "its model reads prompts of plain text in another form than it learned them; give --data.raw "
              f"{str(other).lower()}", file=sys.stderr)
