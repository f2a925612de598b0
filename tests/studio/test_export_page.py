"""The page of exports, in a browser: by keyboard, in light and dark, on a narrow screen."""

from __future__ import annotations

import sys

import pytest

from hybrid_rlhf.studio import exports, jobs, new_jobs
from hybrid_rlhf.studio.studio import Route
from tests.factories import studio_server
from tests.factories.browser import ALL_IMPACTS, axe_faults, find, narrow, needs_axe, needs_browser, texts, until
from tests.factories.studio_jobs import EXPORT, use_quick_launcher
from tests.factories.studio_runs import make_run

pytestmark = [needs_browser, pytest.mark.slow]
ROWS = [{"id": "demo/ppo", "stage": "ppo", "status": "finished", "has_model": True},
        {"id": "demo/sft", "stage": "sft", "status": "finished", "has_model": True},
        {"id": "demo/cut", "stage": "sft", "status": "stopped", "has_model": True}]

LATE_POSTS = """const real = window.fetch;
window.fetch = async (...args) => {
  const answer = await real(...args);
  if (args[1]?.method === "POST") await new Promise((resolve) => setTimeout(resolve, 2000));
  return answer;
};"""  # the news of a job that runs is there before the answer that says it waits


@pytest.fixture
def studio(tmp_path, monkeypatch):
    """The parts of this page, and a list of runs."""
    use_quick_launcher(monkeypatch, tmp_path)
    (tmp_path / "export.py").write_text(EXPORT)
    monkeypatch.setattr(jobs, "LAUNCHER", (sys.executable, str(tmp_path / "export.py")))

    def parts(studio):
        queue = jobs.Jobs(studio)
        queue.open()
        routes = [*new_jobs.routes(studio, queue), *exports.routes(studio, queue),
                  Route("GET", "/api/runs", lambda _query, _body: {"folder": "", "runs": ROWS}),
                  Route("GET", "/api/run", lambda query, _body: {"card": f"# {query['id']} <b>is a card</b>"})]
        return routes, [queue.close]

    monkeypatch.setattr(studio_server, "open_parts", parts)
    for run in ("demo/ppo", "demo/sft"):
        make_run(tmp_path / "outputs", run, run[-3:])
    with studio_server.running_studio(tmp_path / "outputs") as found:
        yield found


def open_page(browser, studio, rest: str = "") -> None:
    browser.get(studio.url)
    browser.get(f"{studio.base}/#/export{rest}")
    until(browser, lambda: find(browser, "#export-name").get_attribute("value"))


def press(browser, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


def overwrite(browser, text: str) -> None:
    """In place of all that the field has."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    ActionChains(browser).key_down(Keys.CONTROL).send_keys("a").key_up(Keys.CONTROL).send_keys(text).perform()


def focused(browser) -> str:
    return browser.execute_script("return document.activeElement.id || document.activeElement.textContent")


def test_an_export_by_keyboard_alone(browser, studio):
    from selenium.webdriver.common.keys import Keys

    open_page(browser, studio, "?run=demo%2Fsft")
    assert texts(browser, "#export-run option") == ["demo/ppo (ppo)", "demo/sft (sft)"]  # finished ones
    assert find(browser, "#export-run").get_attribute("value") == "demo/sft"
    assert find(browser, "#export-name").get_attribute("value") == "demo-sft"
    until(browser, lambda: texts(browser, ".export-card pre") == ["# demo/sft <b>is a card</b>"])  # as text
    find(browser, "#page").click()
    browser.execute_script("document.getElementById('export-run').focus()")
    press(browser, "demo/p", Keys.TAB)
    until(browser, lambda: find(browser, "#export-name").get_attribute("value") == "demo-ppo")
    overwrite(browser, "../mine")
    press(browser, Keys.ENTER)
    until(browser, lambda: "begins with a letter" in find(browser, "form [role=alert]").text)
    assert focused(browser) == "export-name" and find(browser, "#export-name").get_attribute("aria-invalid") == "true"
    overwrite(browser, "mine")
    press(browser, Keys.TAB, "q8", Keys.TAB, Keys.SPACE, Keys.TAB)
    assert focused(browser) == "Export"
    press(browser, Keys.ENTER)
    until(browser, lambda: texts(browser, "article h3") == ["mine"])
    until(browser, lambda: find(browser, "section p").text.startswith("export of demo/ppo: done"))
    assert focused(browser) == "Export"
    until(browser, lambda: "tokens equal" in find(browser, "section pre").text)
    until(browser, lambda: texts(browser, ".export-check") == [
        "reloaded in a fresh process: tokens equal, logits within 3e-07 (relative)"])
    assert texts(browser, ".export-command h4") == [
        "transformers", "chat in a terminal", "serve (OpenAI's API)", "Ollama", "llama.cpp"]
    until(browser, lambda: find(browser, "#export-name").get_attribute("value") == "demo-ppo")


def test_a_failed_export_says_why_and_one_that_runs_is_found_again(browser, studio, tmp_path):
    (tmp_path / "export.py").write_text("import os, sys, time\nprint('error: the model is <i>damaged</i>')\n"
                                        f"while not os.path.exists({str(tmp_path / 'go')!r}):\n    time.sleep(.1)\n"
                                        "sys.exit(2)")
    open_page(browser, studio)
    browser.execute_script(LATE_POSTS)
    find(browser, "form button").click()
    until(browser, lambda: find(browser, "section p").text.startswith("export of demo/ppo: running"))
    browser.refresh()
    until(browser, lambda: find(browser, "section p").text.startswith("export of demo/ppo: "))
    (tmp_path / "go").touch()
    until(browser, lambda: find(browser, "section p").text.startswith("export of demo/ppo: failed"))
    assert find(browser, "section p.fault").text == "error: the model is <i>damaged</i>"
    assert "fault" in find(browser, "#status").get_attribute("class")
    assert not find(browser, "section button").is_displayed()


@needs_axe
def test_the_page_has_no_findings_and_no_word_is_cut_off(browser, studio):
    open_page(browser, studio)
    find(browser, "#export-ollama").click()
    find(browser, "form button").click()
    until(browser, lambda: texts(browser, "article h3"))
    browser.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    for scheme in ("light", "dark"):
        assert axe_faults(browser, scheme, ALL_IMPACTS) == []
    for width in (1100, 360):
        with narrow(browser, width):
            assert browser.execute_script("let e = document.documentElement; return e.scrollWidth - e.clientWidth") == 0
