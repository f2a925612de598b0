"""The sampling settings that a model is published with, which chat and server take where nothing else is asked for.

Training samples by its own settings alone: top-k or a temperature of the model's would change the policy unseen.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.models.load import read_generation

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


def published_sampling(path: str, but: Collection[str] = ()) -> dict[str, float]:
    """Those of NAMES, `but` some, that the generation_config of the model at `path` has, as SamplingConfig takes them;
    one that it does not take is left out."""
    settings = read_generation(path)
    values = {} if settings is None else settings.to_diff_dict()
    taken = {name: _as_taken(name, values.get(name)) for name in NAMES if name not in but}
    return {name: value for name, value in taken.items() if value is not None}


def _as_taken(name: str, value: object) -> float | None:
    default = SamplingConfig()
    if type(value) not in (int, float):
        return None
    try:
        return getattr(replace(default, **{name: type(getattr(default, name))(value)}), name)
    except UserError:
        return None


def announced(name: str, values: dict[str, float], unless: str) -> str:
    """The line that tells of `values`."""
    return (f"{name} samples by its generation_config.json unless {unless}: "
            f"{', '.join(f'{setting} {value:g}' for setting, value in values.items())}")
