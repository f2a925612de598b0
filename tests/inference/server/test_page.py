"""The server's page in a real Chromium: it streams, stops, compares, scores, and needs nothing from elsewhere."""

from __future__ import annotations

import base64
import time
from pathlib import Path

import pytest

from hybrid_rlhf.engine.decode.serving import Serving
from hybrid_rlhf.inference.scorer import Scorer
from hybrid_rlhf.inference.server.served_model import Limits
from tests.factories import vision
from tests.factories.browser import axe_faults, find, needs_axe, needs_browser, retype, texts, until
from tests.factories.tiny import chatml_tokenizer, save_tiny, tiny_scalar_model
from tests.inference.server.tiny_server import chat, content, running

pytestmark = [needs_browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folders = {name: save_tiny(tmp_path_factory.mktemp(name), seed, max_position_embeddings=8192)
               for seed, name in enumerate(("base", "ppo"))}
    reward = tmp_path_factory.mktemp("reward")
    tiny_scalar_model().save_pretrained(reward)
    tokenizer = chatml_tokenizer()
    tokenizer.save_pretrained(reward)
    scorer = Scorer(str(reward))
    scorer.open()
    with running(folders, scorer=scorer, capacity=8192, limits=Limits(max_new_tokens=8000)) as found:
        yield found


@pytest.fixture
def page(browser, served):
    from selenium.webdriver.support.ui import Select

    browser.get(served.url)
    until(browser, lambda: Select(find(browser, "#model")).options)
    fill(browser, "#max_tokens", "12")
    return browser


def fill(browser, selector: str, text: str) -> None:
    if not find(browser, selector).is_displayed():
        find(browser, "summary").click()
    retype(find(browser, selector), text)


def choose(browser, selector: str, name: str) -> None:
    from selenium.webdriver.support.ui import Select

    Select(find(browser, selector)).select_by_visible_text(name)


def say(browser, text: str) -> None:
    find(browser, "#message").send_keys(text + "\n")


def is_answered(browser) -> bool:
    return find(browser, "#status").text == "Answered."


def test_an_answer_is_the_servers_and_the_next_question_carries_the_history(page, served):
    choose(page, "#model", "ppo")
    say(page, "Hello?")
    until(page, lambda: is_answered(page))
    settings = dict(model="ppo", temperature=0.7, max_tokens=12)
    first = content(chat(served.url, "Hello?", seed=0, **settings))
    assert texts(page, ".answer .said") == [first]
    say(page, "And?")
    until(page, lambda: len(texts(page, ".answer .said")) == 2 and is_answered(page))
    talk = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": first},
            {"role": "user", "content": "And?"}]
    assert texts(page, ".answer .said")[1] == content(chat(served.url, messages=talk, seed=1, **settings))


def test_two_models_answer_side_by_side_each_with_a_score(page):
    choose(page, "#model", "base")
    choose(page, "#other", "ppo")
    say(page, "Hello?")
    until(page, lambda: is_answered(page))
    who = texts(page, ".answer .who")
    assert [w[:4] for w in who] == ["base", "ppo" + who[1][3]]
    assert all("score " in w for w in who)
    left, right = (e.rect for e in page.find_elements("css selector", ".answer"))
    assert left["y"] == right["y"]
    assert left["x"] < right["x"]


def test_stop_keeps_what_was_written_and_escape_stops_too(page, served, monkeypatch):
    from selenium.webdriver.common.keys import Keys

    step = Serving.step  # slower: an answer is not through before a slow browser stops it, nor too long to be shown
    monkeypatch.setattr(Serving, "step", lambda self: (time.sleep(0.03), step(self))[1])
    for stop in (lambda: find(page, "#stop").click(), lambda: find(page, "#message").send_keys(Keys.ESCAPE)):
        fill(page, "#max_tokens", "4000")
        fill(page, "#temperature", "0")  # a random model that is greedy never comes to an end
        say(page, "Tell me everything.")
        until(page, lambda: texts(page, ".turn:last-child .said")[-1] != "")
        stop()
        until(page, lambda: "stopped" in texts(page, ".answer .who")[-1])
        assert texts(page, ".answer .said")[-1]
        until(page, lambda: all(m.num_open == 0 for m in served.models))


def test_a_refusal_is_shown_in_the_servers_words(page):
    fill(page, "#temperature", "-3")
    page.execute_script("document.getElementById('composer').noValidate = true")
    say(page, "Hello?")
    until(page, lambda: "temperature" in "".join(texts(page, ".answer .fault")))


def dropped(browser, path: str) -> None:
    """Drop a file on the page, as a hand would."""
    data = base64.b64encode(Path(path).read_bytes()).decode()
    browser.execute_script("""
        const files = new DataTransfer(), bytes = Uint8Array.from(atob(arguments[0]), (c) => c.charCodeAt(0));
        files.items.add(new File([bytes], "dropped.png", {type: "image/png"}));
        document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: files, bubbles: true, cancelable: true}));
    """, data)


def attached(browser) -> list[str]:
    return [image.get_attribute("alt") for image in browser.find_elements("css selector", "#attached img")]


@needs_axe
def test_a_picture_is_shown_and_the_answer_is_that_to_the_file_itself(browser, tmp_path):
    from PIL import Image

    files = [image.path for image in vision.image_files()]
    Image.new("RGB", (2000, 1000), "red").save(tmp_path / "wide.png")
    (tmp_path / "no.png").write_text("no picture")
    with running({"seeing": vision.folder("qwen3_vl"), "plain": save_tiny(tmp_path / "plain")},
                 limits=Limits(max_body_bytes=20 * 2**20)) as served:
        browser.get(served.url)
        until(browser, lambda: find(browser, "#model").get_attribute("value"))  # the last one: plain
        assert not find(browser, "#attach").is_displayed()
        dropped(browser, files[0])
        until(browser, lambda: find(browser, "#status").text == "plain reads no images.")
        choose(browser, "#model", "seeing")
        until(browser, lambda: find(browser, "#attach").is_displayed())
        fill(browser, "#max_tokens", "6")
        fill(browser, "#temperature", "1")
        find(browser, "#files").send_keys(f"{files[0]}\n{tmp_path / 'no.png'}")
        until(browser, lambda: find(browser, "#status").text
              == "0.png, 24 x 40; no.png: this browser reads no picture from it")
        dropped(browser, files[1])
        until(browser, lambda: attached(browser) == ["0.png", "dropped.png"])
        for scheme in ("light", "dark"):
            assert axe_faults(browser, scheme) == []
        say(browser, "what")
        until(browser, lambda: is_answered(browser))
        urls = [f"data:image/png;base64,{base64.b64encode(Path(path).read_bytes()).decode()}" for path in files[:2]]
        parts = [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": "what"}]
        expected = chat(served.url, messages=[{"role": "user", "content": parts}], model="seeing", temperature=1,
                        max_tokens=6, seed=0)
        assert texts(browser, ".answer .said") == [content(expected)] and content(expected).strip()
        shown = browser.find_elements("css selector", ".mine img")
        assert [(image.get_attribute("alt"), image.get_attribute("src")) for image in shown] == [
            ("0.png", urls[0]), ("dropped.png", urls[1])]
        assert attached(browser) == []
        find(browser, "#files").send_keys(str(tmp_path / "wide.png"))  # 2 million pixels
        until(browser, lambda: find(browser, "#status").text == "wide.png, 2000 x 1000, scaled down to 1448 x 724")
        find(browser, "[aria-label='Remove wide.png']").click()
        assert attached(browser) == []
        assert not [e for e in browser.get_log("browser") if "Content Security Policy" in e["message"]]


@needs_axe
def test_text_is_never_markup_axe_finds_nothing_and_nothing_comes_from_elsewhere(page, served):
    import json

    page.get_log("performance")  # what came before
    page.refresh()
    until(page, lambda: find(page, "#model").get_attribute("value"))
    choose(page, "#other", "base")
    fill(page, "#max_tokens", "12")
    say(page, "<img src=x onerror=document.title='broken'><b>bold</b>")
    until(page, lambda: is_answered(page))
    assert texts(page, ".mine .said") == ["<img src=x onerror=document.title='broken'><b>bold</b>"]
    assert page.title.startswith("Chat") and not page.find_elements("css selector", ".said *")
    for scheme in ("light", "dark"):
        assert axe_faults(page, scheme) == []
    asked = [json.loads(e["message"])["message"] for e in page.get_log("performance")]
    urls = {e["params"]["request"]["url"] for e in asked if e["method"] == "Network.requestWillBeSent"}
    assert urls and not {u for u in urls if u.startswith(("http", "ws")) and not u.startswith(served.url + "/")}
    assert not [e for e in page.get_log("browser") if "Content Security Policy" in e["message"]]


def test_without_a_mouse_tab_reaches_everything_in_order(browser, served):
    from selenium.webdriver.common.keys import Keys

    page = browser
    page.get(served.url)
    until(page, lambda: find(page, "#status").text == "")
    order = []
    for _ in range(25):
        page.switch_to.active_element.send_keys(Keys.TAB)
        order.append(page.switch_to.active_element.get_attribute("id") or page.switch_to.active_element.tag_name)
    places = [order.index(name) for name in ("model", "other", "fresh", "summary", "log", "message", "send")]
    assert places == sorted(places)


def test_a_key_is_asked_for_and_then_it_works(browser, tmp_path):
    key = "correct horse battery"
    with running({"m": save_tiny(tmp_path)}, api_key=key) as locked:
        browser.get(locked.url)
        until(browser, lambda: "API key" in find(browser, "#status").text)
        find(browser, "#key").send_keys(key + "\t")
        until(browser, lambda: find(browser, "#status").text == "")
        fill(browser, "#max_tokens", "5")
        say(browser, "Hello?")
        until(browser, lambda: is_answered(browser))
        assert texts(browser, ".answer .said") != [""]
