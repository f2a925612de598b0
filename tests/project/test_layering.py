"""The code keeps to its architecture; and each rule of it (layering_rules.py) is seen to fail on a small wrong tree.

A check that cannot fail checks nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project.layering_rules import (
    RULES,
    circles,
    dependencies,
    inheritance,
    mirror,
    names,
    nevers,
    sizes,
    twins,
    upward,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_code_keeps(rule):
    faults = rule(ROOT)
    assert not faults, "\n".join(["", *faults])


CORE, RUN = "hybrid_rlhf/core", "hybrid_rlhf/run"
WRONG = [
    (upward, {f"{CORE}/metrics.py": "import hybrid_rlhf.data"}, "metrics:1 imports hybrid_rlhf.data"),
    (upward, {f"{CORE}/metrics.py": "def f():\n    from ..engine import x"}, "metrics:2 imports hybrid_rlhf.engine"),
    (upward, {"hybrid_rlhf/rollout/record.py": "from hybrid_rlhf import data", "hybrid_rlhf/data/loader.py": ""},
     "rollout.record:1 imports hybrid_rlhf.data"),
    (upward, {"hybrid_rlhf/data/loader.py": "import hybrid_rlhf.engine"}, "loader:1 imports hybrid_rlhf.engine"),
    (upward, {"hybrid_rlhf/data/loader.py": "import hybrid_rlhf.rollout.collect"}, "hybrid_rlhf.rollout.collect"),
    (upward, {f"{RUN}/loop.py": "import importlib\nimportlib.import_module('hybrid_rlhf.trainers.ppo')"},
     "loop:2 imports hybrid_rlhf.trainers.ppo"),
    (upward, {f"{RUN}/loop.py": "from training.step1_sft import recipe"}, "imports hybrid_rlhf.training"),
    (upward, {"hybrid_rlhf/misc.py": ""}, "misc belongs to no package"),
    (circles, {"hybrid_rlhf/data/a.py": "from hybrid_rlhf.data import b", "hybrid_rlhf/data/b.py": "from . import a"},
     "circle: hybrid_rlhf.data.a -> hybrid_rlhf.data.b -> hybrid_rlhf.data.a"),
    (nevers, {"inference/chat/repl.py": "from hybrid_rlhf.run.reporter import x"},
     "repl:1 imports hybrid_rlhf.run.reporter"),
    (nevers, {"hybrid_rlhf/algorithms/kl.py": "import hybrid_rlhf.core.config"}, "algorithms never does"),
    (nevers, {"hybrid_rlhf/trainers/ppo.py": "import hybrid_rlhf.trainers.sft"}, "trainers never does"),
    (nevers, {"hybrid_rlhf/trainers/ppo.py": "from hybrid_rlhf.engine import x"}, "ppo:1 imports hybrid_rlhf.engine"),
    (dependencies, {"hybrid_rlhf/roles/actor.py": "def f():\n    import deepspeed.comm"},
     "whose place is hybrid_rlhf.engine.train.zero"),
    (dependencies, {"hybrid_rlhf/models/load.py": "from transformers import AutoModel"}, "do it inside the function"),
    (dependencies, {"inference/chat/repl.py": "import trl"}, "trl, whose place is nowhere"),
    (sizes, {"tests/long.py": "def f():\n" + "    x = 1\n" * 60}, "f has 61 lines, more than 60"),
    (twins, {f"{RUN}/plan.py": "", "training/plan.py": ""}, "run.plan and hybrid_rlhf.training.plan have one name"),
    (mirror, {"tests/run/a.py": "from tests.data.test_x import y"}, "a.py:1 imports tests.data.test_x, a test"),
    (mirror, {"tests/misc/test_a.py": ""}, "tests/misc/test_a.py is in no package's folder"),
    (names, {f"{RUN}/utils.py": ""}, "hybrid_rlhf.run.utils is called utils"),
    (names, {f"{RUN}/loop.py": "def fit(args): ..."}, "loop:1 names something args"),
    (names, {f"{RUN}/loop.py": "class RunManager: ..."}, "loop:1 names something manager"),
    (inheritance, {"hybrid_rlhf/data/blend.py": "class A: ...\nclass B(A): ..."}, "B inherits the implementation of A"),
    (inheritance, {f"{RUN}/loop.py": "@dataclass\nclass A:\n    x: int\n    def f(self): ...\nclass C(A): ..."},
     "C inherits the implementation of A"),
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
def test_each_rule_names_the_fault_of_a_wrong_tree(rule, files, fault, tmp_path):
    assert any(fault in sentence for sentence in rule(build(tmp_path, files))), rule(tmp_path)


def test_a_right_tree_has_no_faults(tmp_path):
    build(tmp_path, {
        "train.py": "from hybrid_rlhf.cli import main", "hybrid_rlhf/cli.py": "from hybrid_rlhf.inference import chat",
        "inference/chat/repl.py": "from hybrid_rlhf.engine import hybrid",
        "hybrid_rlhf/engine/hybrid.py": "import torch",
        "hybrid_rlhf/rewards/model.py": "from typing import Protocol\nclass A(Protocol): ...\nclass B(A): ...",
        "hybrid_rlhf/trainers/ppo.py":
            "from hybrid_rlhf.engine.decode.sampling import SamplingConfig\ndef f(*args): ...",
        "hybrid_rlhf/data/record.py": "@dataclass(frozen=True)\nclass A:\n    x: int = 0\n@dataclass\nclass B(A): ...",
        "hybrid_rlhf/models/load.py": "def load():\n    import transformers",
    })
    assert [fault for rule in RULES for fault in rule(tmp_path)] == []
