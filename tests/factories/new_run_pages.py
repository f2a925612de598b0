"""The page of a new run in a browser, over made-up answers: how a test gets there, enters things and reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.factories import studio_server
from tests.factories.browser import find, until
from tests.factories.new_run_stub import Stub
from tests.factories.studio_server import Running, running_studio


class NewRunPage:
    """browser: on the page, once `visit` has been called. stub: what answers it."""

    def __init__(self, browser, stub: Stub, studio: Running) -> None:  # noqa: ANN001
        self.browser, self.stub, self.studio = browser, stub, studio

    def visit(self, query: str = "") -> None:
        """Load it afresh."""
        self.browser.get("about:blank")
        self.browser.get(f"{self.studio.base}/#/new{query}")
        self.until(lambda: self.find("fieldset.goal-cards"))

    def ready(self, query: str = "?goal=prefer&model=demo/sft&data=pairs.jsonl") -> None:
        """The same, until nothing is missing."""
        self.visit(query)
        self.says("Everything is there")

    def until(self, condition):  # noqa: ANN001, ANN201
        return until(self.browser, condition)

    def says(self, text: str) -> None:
        """Until the line on what comes next has this text."""
        self.until(lambda: text in self.find(".next-line").text)

    def find(self, selector: str):  # noqa: ANN201
        return find(self.browser, selector)

    def all(self, selector: str) -> list:
        return self.browser.find_elements("css selector", selector)

    def run(self, script: str, *given: object):  # noqa: ANN201
        return self.browser.execute_script(script, *given)

    def click(self, selector: str) -> None:
        self.until(lambda: self.find(selector)).click()

    def press(self, title: str) -> None:
        """The button that reads so."""
        self.until(lambda: next((b for b in self.all("button") if b.text == title), None)).click()

    def goal(self, name: str) -> None:
        self.click(f"input[value={name}]")
        self.until(lambda: self.find("#step-4"))

    def fill(self, selector: str, text: str) -> None:
        found = self.until(lambda: self.find(selector))
        found.clear()
        found.send_keys(text)

    def set(self, option: str, text: str, tag: str = "input") -> None:
        self.fill(entry(option, tag), text)

    def fault(self, option: str) -> str:
        """What is said against an option; nothing where nothing is shown."""
        return self.find(entry(option, ".fault")).text

    def sent(self, option: str):  # noqa: ANN201
        """Until the studio was asked about settings that have `option`; its value."""
        self.until(lambda: option in self.settings)
        return self.settings[option]

    def sends(self, option: str, value: object) -> None:
        """Until the studio was asked about this value."""
        self.until(lambda: self.settings.get(option) == value)

    @property
    def settings(self) -> dict:
        """Those that the studio was asked about last."""
        return self.stub.last("settings")["settings"]

    def is_focused(self, selector: str) -> bool:
        return self.run("return document.activeElement.matches(arguments[0])", selector)

    def focuses(self, selector: str) -> None:
        """Until the focus is there: the page may have asked the studio first."""
        self.until(lambda: self.is_focused(selector))

    def keys(self, *keys: str) -> None:
        """Pressed wherever the focus is."""
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.browser, duration=0).send_keys(key).perform()

    def tab_to(self, selector: str) -> None:
        from selenium.webdriver.common.keys import Keys

        for _ in range(120):
            if self.is_focused(selector):
                return
            self.keys(Keys.TAB)
        raise AssertionError(f"no key leads to {selector}")

    def open_everything(self) -> None:
        """All folds open, all that can be asked for asked."""
        self.until(lambda: self.find("#ask-plan"))
        for selector in ("input[value=url]", "input[value=own]", "input[value=three]", "#reward-numeric_match",
                         "#has-tools"):
            for found in self.all(selector):
                found.click()
        self.run("for (const d of document.querySelectorAll('details')) d.open = true")
        if "Everything is there" in self.find(".next-line").text:
            self.click("#ask-plan")
            self.until(lambda: self.find(".checks .bars"))
            self.click("#ask-preview")
            self.until(lambda: self.find(".example"))


def entry(option: str, tag: str = "input") -> str:
    """A selector of what is in an option's field."""
    return f"[data-option='{option}'] {tag}"


@contextmanager
def new_run_page(browser, stub: Stub, outputs: Path, monkeypatch) -> Iterator[NewRunPage]:  # noqa: ANN001
    """Nothing was entered yet. At the end no script of the page may have failed."""
    monkeypatch.setattr(studio_server, "open_parts", stub.open_parts)
    with running_studio(outputs) as studio:
        browser.get(studio.url)
        browser.execute_script("sessionStorage.clear()")
        yield NewRunPage(browser, stub, studio)
        browser.get("about:blank")  # its connection for news ends, and the studio need not wait
        faults = [e for e in browser.get_log("browser") if "api/" not in e["message"] and e["level"] == "SEVERE"]
        assert not faults
