"""What a person does on the studio's chat page, by Chromium."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.factories.browser import find, texts, until

SHOTS = os.environ.get("STUDIO_SHOTS")  # a folder for pictures of the page


def choose(page, selector: str, text: str) -> None:
    from selenium.webdriver.support.ui import Select

    Select(find(page, selector)).select_by_visible_text(text)


def open_models(page, *models: str, reward: str | None = None) -> None:
    if not find(page, "#talk-open").is_displayed():
        find(page, "#talk-choice summary").click()
    for number, name in enumerate(models, 1):
        choose(page, f"#talk-model-{number}", name)
    if reward:
        choose(page, "#talk-reward", reward)
    find(page, "#talk-open").click()
    until(page, lambda: find(page, "#talk-state").text.startswith("Open: " + models[0]), 60)


def say(page, text: str) -> None:
    count = len(texts(page, ".turn"))
    until(page, lambda: find(page, "#send").is_enabled())
    find(page, "#message").send_keys(text + "\n")
    until(page, lambda: len(texts(page, ".turn")) == count + 1)
    until(page, lambda: find(page, "#talk-told").text == "Answered.", 60)


def press(page, text: str, number: int = 0) -> None:
    button(page, text, number).click()


def button(page, text: str, number: int = 0):
    found = [b for b in page.find_elements("css selector", ".turn:last-of-type button") if b.text == text]
    return found[number]


def rows(studio, kind: str, name: str = "marks") -> list[dict]:
    path = studio.studio.home / "marks" / f"{name}.{kind}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def told(page, text: str) -> None:
    until(page, lambda: text in find(page, "#talk-told").text)


def shoot(page, name: str) -> None:
    if SHOTS:
        page.save_screenshot(str(Path(SHOTS) / f"{name}.png"))


def fill(page, selector: str, text: str) -> None:
    if not find(page, selector).is_displayed():
        find(page, "#settings summary").click()
    find(page, selector).clear()
    find(page, selector).send_keys(text + "\t")
