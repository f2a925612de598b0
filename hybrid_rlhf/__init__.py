"""hybrid_rlhf: supervised fine-tuning, reward modelling and PPO on one machine, around one hybrid engine."""

from pathlib import Path

__version__ = "0.1.0"

# An installed package holds training/ and inference/ as subpackages (setup.py maps them). In a checkout they stand
# beside this folder, so that `python train.py` works without an install: let the import system look there too.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "training" / "step1_sft").is_dir() and str(_checkout) not in __path__:
    __path__.append(str(_checkout))
