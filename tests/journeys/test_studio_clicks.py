"""Somebody who has never trained, in the studio with the real launcher: every click and every key is counted."""

from __future__ import annotations

import csv
import shutil
import time
from dataclasses import dataclass

import pytest

from hybrid_rlhf.studio import example
from tests.factories.browser import clicked, find, needs_browser, texts, until
from tests.factories.studio_jobs import stop_all
from tests.factories.studio_runs import make_run
from tests.factories.studio_server import running_studio
from tests.factories.tiny import chatml_tokenizer, save_tiny

pytestmark = [needs_browser, pytest.mark.slow, pytest.mark.timeout(900)]
SUMS = [(f"What is {a} + {b}?", str(a + b)) for a in range(8) for b in range(8)]


@dataclass
class Hands:
    """A person at the page. clicks: of a list two, to open it and to choose; keys: typed characters; a file that is
    chosen in the browser's dialog is a click on the button and one in the dialog."""

    browser: object
    clicks: int = 0
    keys: int = 0

    def __post_init__(self) -> None:
        self.began = time.monotonic()

    def wait(self, condition, seconds: float = 240):
        return until(self.browser, condition, seconds)

    def shown(self, selector: str, text: str | None = None):
        """Until there is a visible node with this selector and text."""
        return self.wait(lambda: next((
            node for node in self.browser.find_elements("css selector", selector)
            if node.is_displayed() and (text is None or node.text == text)), None))

    def click(self, selector: str, text: str | None = None) -> None:
        self.wait(lambda: clicked(self.shown(selector, text)))
        self.clicks += 1

    def choose(self, selector: str, value: str) -> None:
        from selenium.webdriver.support.ui import Select

        Select(self.shown(selector)).select_by_value(value)
        self.clicks += 2

    def give(self, selector: str, path) -> None:
        self.wait(lambda: find(self.browser, selector)).send_keys(str(path))
        self.clicks += 2

    def write(self, selector: str, text: str) -> None:
        self.shown(selector).send_keys(text)
        self.keys += len(text)

    def ready(self) -> None:
        self.wait(lambda: "Everything is there" in find(self.browser, ".next-line").text, 480)

    def state(self, *wanted: str) -> str:
        """Until the run is in one of these states, or failed."""
        return self.wait(lambda: (state := find(self.browser, ".state").text) in (*wanted, "failed") and state, 600)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


@pytest.fixture(scope="module")
def studio(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, running_studio(tmp_path_factory.mktemp("home") / "outputs") as found:
        patch.setattr(example, "small_model", lambda: None)  # the toy, on each machine
        yield found
        stop_all(found.client)


@pytest.fixture
def hands(browser, studio):
    browser.get(studio.url)
    browser.execute_script("sessionStorage.clear(); localStorage.clear()")
    browser.get("about:blank")
    browser.get(f"{studio.base}/")
    yield Hands(browser)
    browser.get("about:blank")


def write_csv(path, names: tuple[str, str]) -> str:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(SUMS)
    return str(path)


def test_two_clicks_to_a_first_trained_model_that_answers(hands):
    hands.click(".door button", "Start the example")
    assert hands.state("finished") == "finished", find(hands.browser, "#page").text
    hands.click("a.button", "Talk")
    hands.shown("#message")
    assert (hands.clicks, hands.keys) == (2, 0)
    assert hands.seconds < 600
    hands.click(".hints button")  # a question that the model was trained for
    hands.wait(lambda: [text for text in texts(hands.browser, ".answer .said") if text])


def test_a_table_with_odd_columns_becomes_a_run_without_typing(hands, studio, tmp_path):
    hands.browser.get(f"{studio.base}/#/start")
    hands.click(".door a.button", "New run")
    hands.click("input[value=imitate]")
    hands.click("input[name^=model-kind][value=new]")
    hands.give("#file-data", write_csv(tmp_path / "my sums.csv", ("Riddle (easy)", "Solution")))
    hands.choose("#column-data-prompt", "Riddle (easy)")
    hands.choose("#column-data-completion", "Solution")
    hands.ready()
    assert find(hands.browser, "#run-name").get_attribute("value") == "my-sums-sft"
    hands.click("#start")
    assert hands.state("running", "finished") in ("running", "finished"), find(hands.browser, "#page").text
    assert (hands.clicks, hands.keys) == (10, 0)
    assert hands.seconds < 400  # half a minute where the machine has nothing else to do
    assert hands.state("finished") == "finished", find(hands.browser, "#page").text


def test_a_reward_function_is_written_tried_and_trained_on_in_the_page(hands, studio, tmp_path):
    model = make_run(studio.studio.outputs, "small", "sft", 2).folder / "model"
    shutil.rmtree(model)
    save_tiny(model, max_position_embeddings=1024)
    chatml_tokenizer().save_pretrained(model)
    hands.browser.get(f"{studio.base}/#/start")
    hands.click(".door a.button", "New run")
    hands.click("input[value=function]")
    hands.click(".offers button", "small")  # Or take small (your run, sft)
    hands.give("#file-data", write_csv(tmp_path / "sums.csv", ("prompt", "answer")))
    hands.click("summary", "Write a function here")
    hands.choose("#code-template", "A number")
    hands.write("#code-token", studio.token)
    hands.click("button", "Try on the first rows")
    hands.wait(lambda: "1" in texts(hands.browser, "details.more td.number"))  # each row's own answer is right
    hands.click("button", "Keep and use it")
    hands.ready()
    hands.click("#start")
    assert (hands.clicks, hands.keys) == (11, len(studio.token))
    assert hands.state("running", "finished") in ("running", "finished"), find(hands.browser, "#page").text
    assert hands.seconds < 400
    run = hands.browser.current_url.partition("#/run/")[2]
    hands.wait(lambda: (studio.studio.outputs / run / "config.yaml").exists())
    assert ".studio/rewards/my_reward.py:reward" in (studio.studio.outputs / run / "config.yaml").read_text()
    hands.wait(lambda: "reward" in texts(hands.browser, "[data-metric] code"), 480)
    hands.wait(lambda: find(hands.browser, ".state").text == "finished" or any(
        clicked(node) for node in hands.browser.find_elements("css selector", "button")
        if node.text == "Stop with a checkpoint"))
    assert hands.state("stopped", "finished") in ("stopped", "finished"), find(hands.browser, "#page").text
