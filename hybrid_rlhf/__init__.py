"""hybrid_rlhf: supervised fine-tuning, reward modelling and PPO on one machine, around one hybrid engine."""

import importlib
from pathlib import Path

__version__ = "0.1.0"

_FROM_PYTHON = ("SFTTrainer", "RewardTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer", "PPOTrainer",
                "DistillTrainer", "GKDTrainer")
_CONFIGS = ("SFTConfig", "RewardConfig", "DPOConfig", "KTOConfig", "GRPOConfig", "RLOOConfig", "PPOConfig", "GKDConfig")

# An installed package holds training/ and inference/ as subpackages (setup.py maps them). In a checkout they stand
# beside this folder, so that `python train.py` works without an install: let the import system look there too.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "training" / "step1_sft").is_dir() and str(_checkout) not in __path__:
    __path__.append(str(_checkout))


def __getattr__(name: str) -> object:
    """The trainers, on first use: importing the package loads neither torch nor transformers."""
    if name in _FROM_PYTHON:
        return getattr(importlib.import_module(f"{__name__}.api"), name)
    if name in _CONFIGS:
        return getattr(importlib.import_module(f"{__name__}.trl_configs"), name)
    if name == "UserError":
        return importlib.import_module(f"{__name__}.core.config").UserError
    if name.endswith(("Config", "Trainer", "Parser", "Arguments")) and (instead := importlib.import_module(
            f"{__name__}.trl_words").missing(name)):
        raise ImportError(instead)  # `from hybrid_rlhf import NAME` drops the message of an AttributeError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FROM_PYTHON, *_CONFIGS, "UserError"])
