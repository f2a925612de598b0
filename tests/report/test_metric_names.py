"""Every metric has its line, in the reports and in the guide."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_rlhf.report.metric_names import MEANINGS, meaning
from hybrid_rlhf.report.summary import conclude

ROOT = Path(__file__).parents[2]


def test_the_guide_has_the_reports_own_words() -> None:
    text = (ROOT / "docs" / "guide" / "report.md").read_text(encoding="utf-8")
    table = text.split("| metric | meaning |\n|---|---|\n")[1]
    assert table == "".join(f"| `{name}` | {line} |\n" for name, line in MEANINGS.items())


@pytest.mark.parametrize("name, words", [
    ("eval/accuracy", "0.5 is chance"), ("rewards/my.py:f/mean", "of this source"),
    ("value/grad_norm", "of the critic"),
    ("value/loss", "loss of the critic"), ("ptx/loss", "PPO-ptx"), ("mine", "")])
def test_a_name_has_the_first_line_that_fits_it(name, words) -> None:
    assert words in meaning(name) and bool(meaning(name)) == bool(words)


def test_the_meaning_stands_beside_the_value(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "kl": 1.5, "mine": 2, "memory/actor/update": 3294967296}\n'
                                            '{"step": 3, "eval/loss": 0.25}\n')
    conclude(tmp_path, "ppo")
    text, page = ((tmp_path / f"report.{kind}").read_text(encoding="utf-8") for kind in ("md", "html"))
    assert f"| kl | 1.5 | {MEANINGS['kl']} |" in text and "| mine | 2 |  |" in text
    assert f"| loss | 0.25 | {MEANINGS['loss']} |" in text
    assert "| memory/actor/update | 3.1 GiB | " in text and ">3.1 GiB<" in page and 'number">1.5<' in page
    assert MEANINGS["kl"] in page and MEANINGS["loss"] in page
