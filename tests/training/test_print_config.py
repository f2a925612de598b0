"""--print_config=comments: a stage's file with every option and what it means, which runs as the stage alone does."""

from __future__ import annotations

import pytest

from hybrid_rlhf.cli import main
from hybrid_rlhf.training.registry import STAGES


def printed(capsys, *words: str) -> str:
    with pytest.raises(SystemExit):
        main(list(words))
    return capsys.readouterr().out


@pytest.mark.parametrize("stage", STAGES)
def test_the_printed_file_says_what_each_option_means_and_runs_as_the_stage_alone_does(stage, tmp_path, capsys):
    text = printed(capsys, "--stage", stage, "--print_config=comments")
    assert f"stage: {stage}" in text and text.count("# ") > 20
    (tmp_path / "stage.yaml").write_text(text)
    given = printed(capsys, "--stage", stage, "--config", str(tmp_path / "stage.yaml"), "--print_config")
    assert given == printed(capsys, "--stage", stage, "--print_config")
