"""report.md, report.html and their pictures: what is drawn, what is said, and that no text in them is markup."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import pytest

from hybrid_rlhf.report import plots, summary
from hybrid_rlhf.report.metric_names import MEANINGS, meaning
from hybrid_rlhf.report.plots import SUBJECTS, lines_of, smooth
from hybrid_rlhf.report.summary import RunSummary, conclude

pytestmark = pytest.mark.plots

ROOT = Path(__file__).parents[2]
HOSTILE = "<script>alert(1)</script> | a\x1b[31m ![x](http://evil) `b`"


def history(steps: int = 30) -> list[dict]:
    rows = [{"step": s, "reward": s / 10, "rewards/model/mean": s / 10, "objective/kl": 0.1 * s, "entropy": 2.0,
             "policy/loss": 1.0 / s, "value/explained_variance": 0.5, "completions/mean_length": 9.0,
             "time/generate": 1.0, "time/score": 0.5, "time/train": 2.0, "grad_norm": 0.0} for s in range(1, steps + 1)]
    return [*rows, {"step": steps, "eval/reward": 2.5}]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in history()))
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps({
        "step": s, "prompt": f"{HOSTILE} {s}", "completion": f"answer {s}", "score": s / 4}) + "\n"
        for s in (1, 15, 30)))
    (tmp_path / "run.json").write_text(json.dumps({"command": "train.py --stage ppo", "versions": {"torch": "2.13"},
                                                   "seconds": 75.0}))
    return tmp_path


def test_the_report_has_curves_words_before_and_after_and_the_command(folder):
    summary.conclude(folder, "ppo")
    text = (folder / "report.md").read_text()
    drawn = sorted(p.name for p in (folder / "plots").glob("*.png"))
    assert drawn == ["entropy.png", "kl_to_the_reference.png", "loss.png", "response_length.png", "reward.png",
                     "value_explained_variance.png", "where_a_step_s_time_goes.png"]
    assert sorted(re.findall(r"^!\[.*\]\(plots/(.*)\)$", text, re.MULTILINE)) == drawn
    parts = ("Samples at the start (step 1)", "answer 1 ", "Samples at the end (step 30)")
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "answer 15" not in text
    assert "`train.py --stage ppo`" in text
    assert "torch 2.13" in text


def test_what_a_model_wrote_is_no_markup_in_either_report(folder):
    summary.conclude(folder, "ppo")
    text = (folder / "report.md").read_text()
    assert "\x1b" not in text
    row = next(line for line in text.splitlines() if "evil" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 4  # the cells' own
    assert not re.search(r"(?<!\\)[<!`]", row)
    assert "<script>" not in (folder / "report.html").read_text()


def test_the_page_is_one_file_that_loads_nothing(folder):
    summary.conclude(folder, "ppo")
    sources, tags = [], []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            tags.append(tag)
            sources.extend(v for k, v in attrs if k in ("src", "href"))

    Reader().feed((folder / "report.html").read_text())
    assert tags.count("img") == 7
    assert "script" not in tags
    assert all(s.startswith(("data:image/png;base64,", "#")) for s in sources)


def test_stages_are_compared_on_one_page(folder):
    for stage in ("sft", "ppo"):
        (folder / stage).mkdir()
        for name in ("metrics.jsonl", "run.json"):
            (folder / stage / name).write_text((folder / name).read_text())
    path = summary.compare_stages(folder, ["sft", "reward", "ppo"], [{"model": "sft", "accuracy": 0.5}],
                                  [{"prompt": "p & q", "sft": "a", "ppo": "b"}])
    text = path.read_text()
    assert text.index("accuracy") < text.index("p &amp; q") < text.index('id="sft"') < text.index('id="ppo"')
    assert 'id="reward"' not in text


def test_without_matplotlib_the_report_says_so(folder, monkeypatch):
    def missing(*_):
        raise ImportError

    monkeypatch.setattr(summary, "draw", missing)
    summary.conclude(folder, "ppo")
    assert "matplotlib is not installed" in (folder / "report.md").read_text()
    assert "matplotlib is not installed" in (folder / "report.html").read_text()


def test_equal_and_empty_lines_are_drawn_once_or_not():
    subject = {s.title: s for s in SUBJECTS}
    assert list(lines_of(history(), subject["reward"])) == ["reward", "eval/reward"]
    assert lines_of(history(), subject["gradient norm"]) == {}
    assert lines_of([{"step": 1, "entropy": None}], subject["entropy"]) == {}


def test_smoothing_is_a_mean_over_neighbours():
    assert smooth([0.0, 3.0, 0.0, 3.0]) == [1.5, 1.0, 2.0, 1.5]
    assert smooth([1.0] * 100) == [1.0] * 100


def test_old_pictures_do_not_stay(folder):
    summary.conclude(folder, "ppo")
    assert [p.stem for p in plots.draw([{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}], folder)] == ["loss"]
    assert [p.stem for p in (folder / "plots").iterdir()] == ["loss"]


def _answer(folder, rows: list[dict]) -> str:
    (folder / "answers.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    summary.conclude(folder, "ppo")
    assert "step 30" in (folder / "report.html").read_text()
    return (folder / "report.md").read_text()


def test_the_same_prompts_before_and_after_stand_side_by_side(folder):
    text = _answer(folder, [{"step": s, "prompt": p, "completion": f"{p}{s}", "score": s + 0.5}
                            for s in (0, 30) for p in ("ask ", "beg ")])
    assert "## The same prompts before and after\n\n| prompt | step 0 | step 30 |" in text
    assert "| ask | ask 0 (score 0.5) | ask 30 (score 30.5) |" in text
    assert "at the start" not in text


def test_a_reward_model_s_scores_of_the_same_responses_stand_side_by_side(folder):
    text = _answer(folder, [{"step": s, "prompt": "ask", "completion": side, "score": s + i, "side": side}
                            for s in (0, 30) for i, side in enumerate(("chosen", "rejected"))])
    assert "| prompt | response | was | score, step 0 | score, step 30 |" in text
    assert re.search(r"\| ask \| rejected \| rejected \| 1\S* \| 31\S* \|", text)


def test_a_long_prompt_keeps_its_end_where_the_question_is():
    rows = [{"step": 1, "prompt": f"system {'x ' * 100}user How hot is tea?", "completion": "Hot."}]
    assert "How hot is tea?" in summary.markdown(RunSummary("sft", [], [], [], "", [], rows, {}))


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


def test_the_meaning_stands_beside_the_value(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(summary, "draw", lambda *_: [])
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "kl": 1.5, "mine": 2, "memory/actor/update": 3294967296}\n'
                                            '{"step": 3, "eval/loss": 0.25}\n')
    conclude(tmp_path, "ppo")
    text, page = ((tmp_path / f"report.{kind}").read_text(encoding="utf-8") for kind in ("md", "html"))
    assert f"| kl | 1.5 | {MEANINGS['kl']} |" in text and "| mine | 2 |  |" in text
    assert f"| loss | 0.25 | {MEANINGS['loss']} |" in text
    assert "| memory/actor/update | 3.1 GiB | " in text and ">3.1 GiB<" in page and 'number">1.5<' in page
    assert MEANINGS["kl"] in page and MEANINGS["loss"] in page


def _seen(page: str) -> list[tuple[str, tuple[int, int], tuple[int, int, int]]]:
    """Name, size and the colour of the middle of each picture of a page that is data, but for plots."""
    from PIL import Image

    found = re.findall(r'<img alt="([^"]*)" title="[^"]*" src="data:image/jpeg;base64,([^"]*)">', page)
    opened = [(name, Image.open(BytesIO(base64.b64decode(data)))) for name, data in found]
    return [(name, image.size, image.getpixel((image.width // 2, image.height // 2))) for name, image in opened]


def test_samples_show_small_pictures_of_their_images_and_a_gone_one_its_name(folder):
    from PIL import Image

    Image.new("RGB", (600, 300), (250, 0, 0)).save(folder / "red <b>.png")
    Image.new("L", (32, 32), 200).save(folder / "grey.gif")
    (folder / "text.png").write_text("no image")
    images = [str(folder / name) for name in ("red <b>.png", "grey.gif", "gone.png", "text.png")]
    text = _answer(folder, [{"step": s, "prompt": "ask", "images": images, "completion": f"{s}"} for s in (0, 30)])
    page = (folder / "report.html").read_text()
    red, grey = _seen(page)
    assert red[:2] == ("red &lt;b&gt;.png", (128, 64)) and red[2] == pytest.approx((250, 0, 0), abs=6)
    assert grey[:2] == ("grey.gif", (32, 32)) and grey[2] == pytest.approx((200, 200, 200), abs=6)
    assert "gone.png (cannot be read)" in page and "text.png (cannot be read)" in page and str(folder) not in page
    assert "| prompt | images | step 0 | step 30 |" in text and "grey.gif, gone.png" in text


def test_of_many_images_a_report_shows_some_and_says_how_many_more(tmp_path):
    from PIL import Image

    Image.new("RGB", (8, 8)).save(tmp_path / "one.png")
    page = summary.pictures([str(tmp_path / "one.png")] * 11)
    assert page.count("<img") == 8 and page.endswith("and 3 more</span> ")
    assert "<img" not in summary.pictures([str(tmp_path), "\0", 5])  # a folder; names that no file has
