"""examples/stages: a commented file of every stage that says what the code says."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from pathlib import Path

import pytest
import yaml

from hybrid_rlhf.cli import STAGES, main, unused_by
from hybrid_rlhf.config import parse

FOLDER = Path(__file__).parent.parent / "examples" / "stages"


@pytest.fixture(scope="module")
def write():
    """The script that writes the files."""
    spec = importlib.util.spec_from_file_location("stage_files", FOLDER / "write.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_every_stage_has_a_file_and_no_other_is_there():
    assert {p.stem for p in FOLDER.glob("*.yaml")} == set(STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_s_file_holds_every_option_with_its_default_and_a_comment(stage, write):
    path, row = FOLDER / f"{stage}.yaml", STAGES[stage]
    config_class = importlib.import_module(row.module).Config
    config, _ = parse(config_class, list(row.preset), prog=stage)
    assert parse(config_class, ["--config", str(path)], prog=stage)[0] == config
    unused = tuple(f"{option}." for option in unused_by(stage))
    wanted = {key for key in keys(dataclasses.asdict(config)) if not f"{key}.".startswith(unused)}
    assert keys(yaml.safe_load(path.read_text())) == wanted
    lines = path.read_text().splitlines()
    options = [i for i, line in enumerate(lines) if re.match(r" *[a-z0-9_]+:", line)]
    assert len(options) == len(wanted)
    assert all(len(lines[i - 1].lstrip("# ")) > 1 and lines[i - 1].lstrip().startswith("#") for i in options)
    assert path.read_text() == write.render(stage), "stale: run python examples/stages/write.py"


def keys(settings: dict, prefix: str = "") -> set[str]:
    """Dotted names of all settings and sections; what a free mapping such as reward.options holds is no name."""
    found = set()
    for key, value in settings.items():
        found |= {prefix + key} | (keys(value, f"{prefix}{key}.") if isinstance(value, dict) else set())
    return found


def test_a_file_runs_its_stage_as_the_stage_s_name_alone_does(capsys):
    shown = []
    for given in ([], ["--config", str(FOLDER / "grpo.yaml")]):
        with pytest.raises(SystemExit):  # jsonargparse prints and leaves
            main(["--stage", "grpo", *given, "--seed", "5", "--print_config"])
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and "estimator: grpo" in shown[0] and "seed: 5" in shown[0]
