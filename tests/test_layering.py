"""The house keeps its plan; and each rule of the plan (layering_rules.py) is seen to fail on a small wrong house.

A check that cannot fail checks nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from layering_rules import RULES, circles, doors, inheritance, names, nevers, sizes, upward

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps(rule):
    faults = rule(ROOT)
    assert not faults, "\n".join(["", *faults])


WRONG = [
    (upward, {"hybrid_rlhf/tensors.py": "import hybrid_rlhf.metrics"}, "tensors:1 imports hybrid_rlhf.metrics"),
    (upward, {"hybrid_rlhf/metrics.py": "def f():\n    from .engine import x"}, "metrics:2 imports hybrid_rlhf.engine"),
    (upward, {"hybrid_rlhf/rollout.py": "from hybrid_rlhf import data", "hybrid_rlhf/data/loader.py": ""},
     "rollout:1 imports hybrid_rlhf.data"),
    (upward, {"hybrid_rlhf/data/loader.py": "import hybrid_rlhf.engine"}, "loader:1 imports hybrid_rlhf.engine"),
    (upward, {"hybrid_rlhf/run/fit.py": "import importlib\nimportlib.import_module('hybrid_rlhf.trainers.ppo')"},
     "fit:2 imports hybrid_rlhf.trainers.ppo"),
    (upward, {"hybrid_rlhf/run/fit.py": "from training.step1_sft import recipe"}, "imports hybrid_rlhf.training"),
    (upward, {"hybrid_rlhf/misc.py": ""}, "misc belongs to no room"),
    (circles, {"hybrid_rlhf/data/a.py": "from hybrid_rlhf.data import b", "hybrid_rlhf/data/b.py": "from . import a"},
     "circle: hybrid_rlhf.data.a -> hybrid_rlhf.data.b -> hybrid_rlhf.data.a"),
    (nevers, {"inference/chat.py": "from hybrid_rlhf.run.report import x"}, "chat:1 imports hybrid_rlhf.run.report"),
    (nevers, {"hybrid_rlhf/algorithms/kl.py": "import hybrid_rlhf.config"}, "algorithms never does"),
    (nevers, {"hybrid_rlhf/trainers/ppo.py": "import hybrid_rlhf.trainers.sft"}, "trainers never does"),
    (nevers, {"hybrid_rlhf/trainers/ppo.py": "from hybrid_rlhf.engine import x"}, "ppo:1 imports hybrid_rlhf.engine"),
    (doors, {"hybrid_rlhf/roles.py": "def f():\n    import deepspeed.comm"}, "whose door is hybrid_rlhf.engine.zero"),
    (doors, {"hybrid_rlhf/models/load.py": "from transformers import AutoModel"}, "do it inside the function"),
    (doors, {"inference/chat.py": "import trl"}, "trl, whose door is nowhere"),
    (sizes, {"examples/long.py": "x = 1\n" * 401}, "401 lines, more than 400"),
    (sizes, {"tests/long.py": "def f():\n" + "    x = 1\n" * 40}, "f has 41 lines, more than 40"),
    (names, {"hybrid_rlhf/run/utils.py": ""}, "hybrid_rlhf.run.utils is called utils"),
    (names, {"hybrid_rlhf/run/fit.py": "def fit(args): ..."}, "fit:1 names something args"),
    (names, {"hybrid_rlhf/run/fit.py": "class RunManager: ..."}, "fit:1 names something manager"),
    (inheritance, {"hybrid_rlhf/roles.py": "class A: ...\nclass B(A): ..."}, "B inherits the implementation of A"),
]


def build(root: Path, files: dict[str, str]) -> Path:
    (root / "hybrid_rlhf").mkdir()
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(files[name], encoding="utf-8")
    for package in {p.parent for p in (root / "hybrid_rlhf").rglob("*.py")} | {root / "hybrid_rlhf"}:
        (package / "__init__.py").touch()
    return root


@pytest.mark.parametrize(("rule", "files", "fault"), WRONG, ids=[f"{r.__name__}-{f}" for r, _, f in WRONG])
def test_each_rule_names_the_fault_of_a_wrong_house(rule, files, fault, tmp_path):
    assert any(fault in sentence for sentence in rule(build(tmp_path, files))), rule(tmp_path)


def test_a_right_house_has_no_faults(tmp_path):
    build(tmp_path, {
        "train.py": "from hybrid_rlhf.cli import main", "hybrid_rlhf/cli.py": "from hybrid_rlhf.inference import chat",
        "inference/chat.py": "from hybrid_rlhf.engine import hybrid", "hybrid_rlhf/engine/hybrid.py": "import torch",
        "hybrid_rlhf/rewards/model.py": "from typing import Protocol\nclass A(Protocol): ...\nclass B(A): ...",
        "hybrid_rlhf/trainers/ppo.py": "from hybrid_rlhf.engine.sampling import SamplingConfig\ndef f(*args): ...",
        "hybrid_rlhf/models/load.py": "def load():\n    import transformers",
    })
    assert [fault for rule in RULES for fault in rule(tmp_path)] == []
