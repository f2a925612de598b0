"""What a run shows in a notebook: one output, written anew at most twice a second, and nothing in other places."""

from __future__ import annotations

import re
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace

import pytest

from hybrid_rlhf.core import activity
from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.report.notebook import CellProgress, display, stderr_in_cell
from hybrid_rlhf.report.terminal import Progress
from hybrid_rlhf.run.loop import Stopped

KEYS = ("reward", "kl", "completions/mean_length")
VALUES = {"reward": 0.123456, "kl": 2.0, "completions/mean_length": 13.25, "other": 9.0}
EVIL = {"prompt": "a\n b", "completion": "\x1b]0;owned\x07<script>x</script>\u202e[red]", "score": 1.25}


class Kernel:
    """IPython's shell as far as it is used: what it was given to show."""

    kernel = object()

    def __init__(self) -> None:
        self.display_pub, self.shown = self, []

    def publish(self, data, metadata, *, transient, update):
        self.shown.append((transient["display_id"], update, data))

    def outputs_of(self) -> dict[str, list]:
        """display_id -> the versions of that output, the first of which alone is none that replaces another."""
        found: dict[str, list] = {}
        for name, is_update, data in self.shown:
            assert is_update == (name in found)
            found.setdefault(name, []).append(data)
        return found


@pytest.fixture
def kernel(monkeypatch):
    shell = Kernel()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    return shell


def test_only_a_kernel_has_a_cell(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert isinstance(display("ppo", KEYS, 2), Progress)
    assert "IPython" not in sys.modules, "it is not imported to find out"
    for shell in (None, SimpleNamespace(kernel=None), SimpleNamespace()):  # not running; in a terminal
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert isinstance(display("ppo", KEYS, 2), Progress)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())  # half imported
    assert isinstance(display("ppo", KEYS, 2), Progress)


def test_many_quick_steps_are_one_output_that_is_written_at_most_twice_a_second(kernel, capsys):
    began = time.perf_counter()
    with display("ppo", KEYS, 2000) as progress:
        for step in range(1, 2001):
            progress.step(step, VALUES, is_logged=True, samples=[EVIL])
            time.sleep(0.0007)
    seconds = time.perf_counter() - began
    (versions,) = kernel.outputs_of().values()
    assert 2 <= len(versions) <= seconds * 2 + 1
    assert capsys.readouterr() == ("", "")


def test_live_are_the_last_rows_and_what_goes_on(kernel):
    progress = CellProgress(kernel, "ppo", KEYS, 100)
    for step in range(1, 96):
        progress.step(step, VALUES | {"reward": step / 1000}, is_logged=step % 10 == 0 or step == 1, samples=[EVIL])
        if step == 90:
            progress.evaluated(90, {"eval/reward": 0.5, "eval/other": 3.0})
    progress._hear("sampling")
    page, text = progress._page()
    rows = [line.split() for line in text.splitlines()[1:]]
    assert rows[0] == ["step", "reward", "kl", "mean_length"]
    assert [row[0] for row in rows[1:]] == ["30", "40", "50", "60", "70", "80", "90", "held", "95"]
    assert rows[-1] == ["95", "0.095", "2", "13.25"] and rows[-2] == ["held", "out", "0.5"]
    assert re.match(r"ppo 95/100, \d+ s passed; sampling$", text.splitlines()[0])
    assert 'value="0.950"' in page and "0.095" in page and "(score 1.25)" in page


def test_at_the_end_are_rows_from_all_of_the_run_its_notes_and_its_curves(kernel, tmp_path):
    pictures = [tmp_path / f"curve_{i}.png" for i in range(8)]
    for path in pictures:
        path.write_bytes(b"picture")
    with display("ppo", KEYS, 300) as progress:
        for step in range(1, 301):
            progress.step(step, VALUES, is_logged=step % 10 == 0 or step == 1, samples=[])
        progress.evaluated(300, {"eval/kl": 0.25})
        progress.evaluated(300, {"eval/loss": 0.75})
        progress.print_line("ppo alarm, entropy: it is <near> 0", "bold red")
        progress.print_line("warning: no room", "yellow")
        progress.pictures(pictures)
    table, curves = (versions[-1] for versions in kernel.outputs_of().values())
    lines = table["text/plain"].splitlines()
    assert re.match(r"ppo: 300 steps in \d+ s, .*iB of memory at most$", lines[0])
    names = [line.split()[0] for line in lines[2:14]]
    assert names == ["1", "30", "60", "90", "120", "150", "180", "210", "240", "270", "300", "held"]
    assert lines[14:] == ["held out after step 300: loss 0.75", "ppo alarm, entropy: it is <near> 0",
                          "warning: no room"]
    assert "it is &lt;near&gt; 0" in table["text/html"] and "<near>" not in table["text/html"]
    page = curves["text/html"]
    assert page.count("data:image/png;base64,cGljdHVyZQ==") == 8 and "2 more curves" in page
    assert curves["text/plain"] == f"curves: {tmp_path}"


def test_a_run_that_fails_leaves_its_table_and_what_it_resumed_from(kernel):
    def fail():
        with display("ppo", KEYS, 30) as progress:
            progress.pace.first = 20
            progress.step(21, VALUES, is_logged=False, samples=[])
            raise UserError("no")

    with pytest.raises(UserError):
        fail()
    (versions,) = kernel.outputs_of().values()
    assert versions[-1]["text/plain"].startswith("ppo: 1 step after 20 in ")


def test_nothing_that_a_model_or_data_says_is_markup(kernel):
    with display("<i>", ("reward", "x/<u>"), 2) as progress:
        progress.step(1, VALUES | {"x/<u>": 1.0}, is_logged=True, samples=[EVIL | {"prompt": "<img src=x>"}])
        progress.announce("<b>")
    page = kernel.shown[-1][2]["text/html"]
    assert "\x1b" not in page and "\u202e" not in page and "&lt;script&gt;x" in page
    assert not re.search(r"<(script|img|u|b|i)>", page) and "<img" not in page


def test_images_of_samples_are_shown_as_small_pictures(kernel, tmp_path):
    from PIL import Image

    Image.new("RGB", (40, 30)).save(tmp_path / "cat.png")
    with display("ppo", KEYS, 2) as progress:
        progress.step(1, VALUES, is_logged=True, samples=[EVIL | {"images": [str(tmp_path / "cat.png")]}])
    assert '<img alt="cat.png" title="cat.png" src="data:image/jpeg;base64,' in kernel.shown[-1][2]["text/html"]


def test_what_the_process_is_doing_is_heard_while_the_run_lasts(kernel):
    with display("ppo", KEYS, 2) as progress:
        activity.doing("sampling")
        assert "; sampling" in progress._status()
    activity.doing("afterwards")
    assert progress._doing == "sampling"


def test_a_run_speaks_to_its_cell_and_elsewhere_to_stderr(kernel, monkeypatch, capsys):
    with redirect_stdout(StringIO()) as cell, stderr_in_cell():
        print("data: 3 rows", file=sys.stderr)
    assert cell.getvalue() == "data: 3 rows\n"
    monkeypatch.delitem(sys.modules, "IPython")
    with stderr_in_cell():
        print("data: 3 rows", file=sys.stderr)
    assert capsys.readouterr() == ("", "data: 3 rows\n")


def test_ipython_shows_a_line_of_an_error_that_is_the_user_s_and_of_a_stopped_run():
    assert UserError("x is 3;\n give \x1b[2J4")._render_traceback_() == ["error: x is 3; give ␛[2J4"]
    assert Stopped("stopped after step 2")._render_traceback_() == ["stopped after step 2"]
