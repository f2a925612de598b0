"""A headless Chromium over a page of ours, and what axe-core says of it.

Tests are skipped where chromium and chromedriver are not installed (Debian: apt install chromium chromium-driver). The
accessibility check needs axe-core from npm: npm install --prefix ~/.cache/hybrid_rlhf/npm axe-core@4, or AXE=FILE.
What a test does not wait for is seen with BROWSER_LATENCY=400, milliseconds of each reply, or BROWSER_SLOWER=6, times.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
AXE = Path(os.environ.get("AXE") or Path.home() / ".cache/hybrid_rlhf/npm/node_modules/axe-core/axe.min.js")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1100,900")
ALL_IMPACTS = ("minor", "moderate", "serious", "critical")
needs_browser = pytest.mark.skipif(not (DRIVER and BROWSER), reason="no chromium and chromedriver on this machine")
needs_axe = pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed")


@contextmanager
def chromium(profile: Path) -> Iterator:
    """A browser of its own, with a folder for its profile."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    if "BROWSER_LATENCY" in os.environ:
        driver.execute_cdp_cmd("Network.enable", {})
        driver.execute_cdp_cmd("Network.emulateNetworkConditions", {
            "offline": False, "latency": int(os.environ["BROWSER_LATENCY"]), "downloadThroughput": -1,
            "uploadThroughput": -1})
    if "BROWSER_SLOWER" in os.environ:
        driver.execute_cdp_cmd("Emulation.setCPUThrottlingRate", {"rate": int(os.environ["BROWSER_SLOWER"])})
    try:
        yield driver
    finally:
        driver.quit()


def find(browser, selector: str):  # noqa: ANN001, ANN201
    from selenium.webdriver.common.by import By

    return browser.find_element(By.CSS_SELECTOR, selector)


def texts(browser, selector: str) -> list[str]:  # noqa: ANN001
    from selenium.webdriver.common.by import By

    return [e.get_attribute("textContent") for e in browser.find_elements(By.CSS_SELECTOR, selector)]


def until(browser, condition: Callable[[], object], seconds: float = 60):  # noqa: ANN001, ANN201
    """What `condition` says as soon as it says anything; what is not there yet, or is replaced, is looked for again."""
    from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    absent = (NoSuchElementException, StaleElementReferenceException, LookupError, StopIteration)
    return WebDriverWait(browser, seconds, poll_frequency=0.05, ignored_exceptions=absent).until(lambda _: condition())


def clicked(node) -> bool:  # noqa: ANN001 - of selenium
    """Whether a click has reached the node, for `until`: what the page draws anew meanwhile is clicked again."""
    from selenium.common.exceptions import ElementClickInterceptedException, ElementNotInteractableException

    if node is None:
        return False
    try:
        node.click()
    except (ElementClickInterceptedException, ElementNotInteractableException):  # it moved, or is not there yet
        return False
    return True


def retype(field, text: str) -> None:  # noqa: ANN001 - of selenium
    """Text in place of all that the field has, as a person types it. Selenium's clear() leaves the field empty and
    unfocused for a moment, in which a page may put its value back, and "20" is typed behind "1500"."""
    from selenium.webdriver.common.keys import Keys

    field.send_keys(Keys.CONTROL, "a", Keys.NULL, Keys.DELETE, text)


def dialog(browser):  # noqa: ANN001, ANN201 - of selenium
    """The page's question (confirm), once it is asked."""
    from selenium.webdriver.support.expected_conditions import alert_is_present

    return until(browser, lambda: alert_is_present()(browser))


@contextmanager
def narrow(browser, width: int = 360, height: int = 800) -> Iterator[None]:  # noqa: ANN001
    """The window of a telephone or another size, until the block ends."""
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def axe_faults(browser, scheme: str = "light", impacts: tuple[str, ...] = ("serious", "critical")) -> list:  # noqa: ANN001
    """(rule, impact, nodes) of each violation of the page as it stands, in a light or dark scheme."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text(encoding="utf-8")})
    found = browser.execute_async_script("axe.run().then(arguments[0])")
    assert found["passes"]
    return [(v["id"], v["impact"], [n["html"] for n in v["nodes"]]) for v in found["violations"]
            if v["impact"] in impacts]
