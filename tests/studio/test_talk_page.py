"""The studio's chat in a real Chromium: open, talk, compare, judge, and train on it."""

from __future__ import annotations

import base64
import json
import re
import sys
import time
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from hybrid_rlhf.data.row_images import Files, resolved
from hybrid_rlhf.data.schema import format_of, read_row
from hybrid_rlhf.engine.decode.serving import Serving
from hybrid_rlhf.inference.scorer import Scorer
from hybrid_rlhf.inference.server.served_model import Limits
from hybrid_rlhf.inference.teaching import Mark
from hybrid_rlhf.studio import chat_process
from tests.factories import vision
from tests.factories.browser import (
    ALL_IMPACTS,
    axe_faults,
    find,
    narrow,
    needs_axe,
    needs_browser,
    retype,
    texts,
    until,
)
from tests.factories.chats import Noting
from tests.factories.studio_runs import make_run
from tests.factories.studio_server import running_studio
from tests.factories.tiny import chatml_tokenizer, save_tiny, tiny_scalar_model
from tests.inference.server.scripted_model import scripted
from tests.inference.server.tiny_server import chat, content, running, serving

pytestmark = [needs_browser, pytest.mark.slow]
ENDS = "<|im_end|>"


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


def fill(page, selector: str, text: str) -> None:
    if not find(page, selector).is_displayed():
        find(page, "#settings summary").click()
    retype(find(page, selector), text + "\t")


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    tiny_scalar_model().save_pretrained(folder)
    chatml_tokenizer().save_pretrained(folder)
    found = Scorer(str(folder))
    found.open()
    return found


@pytest.fixture
def studio(tmp_path, monkeypatch):
    """Runs, and in place of the models' process one that names a server of the test's own (`answering`)."""
    outputs = tmp_path / "outputs"
    for name in ("demo/sft", "demo/ppo"):
        make_run(outputs, name, name.rpartition("/")[2])
    make_run(outputs, "demo/reward", "reward")
    new = make_run(outputs, "new", "grpo", status="running", steps=0)
    monkeypatch.setattr(chat_process, "COMMAND", (sys.executable, "-c", (
        "import os, sys, time\nplace = open(os.environ['SERVING']).read()\n"
        "while os.path.exists(os.environ.get('HELD', '')): time.sleep(0.05)\n"
        "print(place, flush=True)\nif place.startswith('error'): sys.exit(2)\n"
        "while os.read(0, 4096): pass\n")))
    monkeypatch.setenv("SERVING", str(tmp_path / "serving"))
    with running_studio(outputs) as found:
        yield found
    new.die()


def answering(studio, served) -> None:
    (studio.studio.outputs.parent / "serving").write_text(f"serving all at {served.url}")


@pytest.fixture
def script(studio, scorer):
    """Two models that say what they are told to, and a reward model."""
    models = [scripted(name, "qwen2_5") for name in ("demo-sft", "demo-ppo")]
    with serving(models, scorer=scorer) as served:
        answering(studio, served)

        def say(first: list[str], second: list[str] | None = None) -> None:
            for model, answers in zip(models, (first, second or first), strict=True):
                model.lane.engine.answers = [*(text + ENDS for text in answers), ENDS]

        say(["Paris."], ["It is Paris, of course."])
        yield say


@pytest.fixture
def page(browser, studio):
    browser.get("about:blank")
    browser.get(studio.url)
    browser.get(f"{studio.base}/#/talk")
    until(browser, lambda: find(browser, "#talk-model-1 option"))
    return browser


# -- opening ---------------------------------------------------------------------------------------------------------


def test_it_says_what_goes_on_until_the_models_are_there_or_why_not(page, script, studio, monkeypatch):
    held = studio.studio.outputs.parent / "held"
    monkeypatch.setenv("HELD", str(held))
    options = texts(page, "#talk-model-1 option")
    assert set(options) == {"nothing", "demo/sft", "demo/ppo", "new (running: it has no checkpoint yet)"}
    until(page, lambda: find(page, "#talk-state").text == "No model is open.")
    assert not find(page, ".chat").is_displayed()
    place = studio.studio.outputs.parent / "serving"
    works, _ = place.read_text(), place.write_text("error: out of memory (while loading x); take less")
    choose(page, "#talk-model-1", "demo/sft")
    find(page, "#talk-open").click()
    until(page, lambda: find(page, "#talk-state").text == "It cannot be opened: out of memory (while loading x); "
                                                          "take less")
    place.write_text(works)
    held.touch()
    choose(page, "#talk-model-1", "demo/sft")
    find(page, "#talk-open").click()
    until(page, lambda: find(page, "#talk-state").text == "Opening: loading demo-sft ...")
    until(page, lambda: re.fullmatch("[1-9][0-9]* s", find(page, ".opening span").text))
    held.unlink()
    until(page, lambda: find(page, "#talk-state").text == "Open: demo/sft.")
    assert find(page, ".chat").is_displayed() and not find(page, "#talk-open").is_displayed()
    assert page.switch_to.active_element.text == "Models"
    page.switch_to.active_element.click()
    find(page, "#talk-close").click()
    until(page, lambda: find(page, "#talk-state").text == "No model is open.")


def test_a_link_opens_the_model_that_it_names_and_the_same_link_again_nothing(browser, studio, script):
    browser.get(studio.url)
    browser.get(f"{studio.base}/#/talk?model=demo%2Fppo")
    until(browser, lambda: find(browser, "#talk-state").text == "Open: demo/ppo.")
    assert find(browser, "#talk-model-1").get_attribute("value") == "demo/ppo"
    browser.get("about:blank")
    browser.get(f"{studio.base}/#/talk?model=demo%2Fsft")
    until(browser, lambda: find(browser, "#talk-model-1").get_attribute("value") == "demo/sft")
    until(browser, lambda: find(browser, "#talk-state").text == "Open: demo/sft.")  # who comes from a run talks to it
    browser.get("about:blank")
    browser.get(f"{studio.base}/#/talk?model=demo%2Fsft")
    until(browser, lambda: find(browser, "#talk-model-1").get_attribute("value") == "demo/sft")
    until(browser, lambda: find(browser, "#talk-state").text)
    assert find(browser, "#talk-state").text == "Open: demo/sft."


def test_what_is_chosen_and_closed_stays_so_when_the_page_is_shown_again(browser, studio, script):
    browser.get(studio.url)
    browser.get(f"{studio.base}/#/talk?model=demo%2Fppo")
    until(browser, lambda: find(browser, "#talk-state").text == "Open: demo/ppo.")
    browser.execute_script("document.getElementById('talk-choice').open = true")
    find(browser, "#talk-close").click()
    until(browser, lambda: find(browser, "#talk-state").text == "No model is open.")
    choose(browser, "#talk-model-1", "demo/sft")
    make_run(studio.studio.outputs, "late", "sft")
    browser.execute_script("for (const name of ['pagehide', 'pageshow']) dispatchEvent(new Event(name))")
    until(browser, lambda: browser.find_elements("css selector", "#talk-model-1 option[value=late]"))
    assert find(browser, "#talk-model-1").get_attribute("value") == "demo/sft"
    assert find(browser, "#talk-state").text == "No model is open."


# -- talking ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(studio, tmp_path):
    folders = {name: save_tiny(tmp_path / name, seed, max_position_embeddings=8192)
               for seed, name in enumerate(("demo-sft", "demo-ppo"))}
    with running(folders, capacity=8192, limits=Limits(max_new_tokens=4000)) as served:
        answering(studio, served)
        yield served


def test_an_answer_is_the_model_s_and_the_next_question_carries_the_history(page, tiny):
    open_models(page, "demo/ppo")
    fill(page, "#max_tokens", "12")
    fill(page, "#system", "Be brief.")
    say(page, "Hello?")
    settings = dict(model="demo-ppo", temperature=0.7, max_tokens=12)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
    first = content(chat(tiny.url, messages=talk, seed=0, **settings))
    assert texts(page, ".answer .said") == [first]
    say(page, "And?")
    talk += [{"role": "assistant", "content": first}, {"role": "user", "content": "And?"}]
    assert texts(page, ".answer .said")[1] == content(chat(tiny.url, messages=talk, seed=1, **settings))
    find(page, "#again").click()
    until(page, lambda: texts(page, ".answer .said")[1] not in ("", first))
    until(page, lambda: find(page, "#talk-told").text == "Answered.")
    assert texts(page, ".answer .said")[1] == content(chat(tiny.url, messages=talk, seed=1001, **settings))


def test_stop_and_escape_keep_the_text_and_half_an_answer_is_not_judged(page, tiny, monkeypatch):
    from selenium.webdriver.common.keys import Keys

    step = Serving.step  # slower: an answer is not through before a slow browser stops it, nor too long to be shown
    monkeypatch.setattr(Serving, "step", lambda self: (time.sleep(0.03), step(self))[1])
    open_models(page, "demo/sft")
    fill(page, "#max_tokens", "4000")
    fill(page, "#temperature", "0")
    for stop in (lambda: find(page, "#stop").click(), lambda: find(page, "#message").send_keys(Keys.ESCAPE)):
        until(page, lambda: find(page, "#send").is_enabled())
        find(page, "#message").send_keys("Tell me everything.\n")
        until(page, lambda: texts(page, ".turn:last-of-type .said")[-1] != "")
        stop()
        until(page, lambda: "stopped" in texts(page, ".answer .who")[-1])
        until(page, lambda: all(m.num_open == 0 for m in tiny.models))
        until(page, lambda: [b.text for b in page.find_elements("css selector", ".turn:last-of-type button")] == [
            "Say it better"])


def test_the_conversation_stays_while_another_page_is_looked_at(page, script, studio):
    open_models(page, "demo/sft")
    say(page, "What is the capital of France?")
    press(page, "Good")
    told(page, "Marked good.")
    find(page, "#message").send_keys("and of")
    page.get(f"{studio.base}/#/runs")
    until(page, lambda: not page.find_elements("css selector", ".turn"))
    page.get(f"{studio.base}/#/talk")
    until(page, lambda: texts(page, ".answer .said") == ["Paris."])
    assert find(page, "#message").get_attribute("value") == "and of"
    until(page, lambda: find(page, "#send").is_enabled())
    assert button(page, "Good").get_attribute("aria-pressed") == "true"
    find(page, "#fresh").click()
    until(page, lambda: not page.find_elements("css selector", ".turn"))


def test_what_a_model_or_a_user_writes_is_never_markup(page, script):
    script(["<img src=x onerror=document.title='broken'><b>bold</b>"])
    open_models(page, "demo/sft")
    say(page, "<script>document.title='broken'</script>")
    assert texts(page, ".mine .said") == ["<script>document.title='broken'</script>"]
    assert texts(page, ".answer .said") == ["<img src=x onerror=document.title='broken'><b>bold</b>"]
    assert not page.find_elements("css selector", ".said *")
    assert page.title.startswith("Talk")


# -- judging ---------------------------------------------------------------------------------------------------------


def test_thumbs_are_kept_changed_and_taken_back(page, script, studio):
    script(["  Paris."])
    open_models(page, "demo/sft")
    say(page, "What is the capital of France?")
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    kept = {"prompt": prompt, "completion": [{"role": "assistant", "content": "  Paris."}]}
    for text, expected in (("Good", [kept | {"label": True}]), ("Bad", [kept | {"label": False}]), ("Bad", [])):
        press(page, text)
        until(page, lambda expected=expected: rows(studio, "thumbs") == expected)
        pressed = [str(bool(expected and expected[0]["label"] is is_good)).lower() for is_good in (True, False)]
        until(page, lambda pressed=pressed: [button(page, t).get_attribute("aria-pressed") for t in ("Good", "Bad")]
              == pressed)


def test_a_picture_goes_with_the_question_and_with_the_mark_and_stays(page, studio):
    path = vision.image_files()[0].path
    url = f"data:image/png;base64,{base64.b64encode(Path(path).read_bytes()).decode()}"
    with running({"demo-sft": vision.folder("qwen3_vl")}, limits=Limits(max_body_bytes=20 * 2**20)) as served:
        answering(studio, served)
        open_models(page, "demo/sft")
        until(page, lambda: find(page, "#attach").is_displayed())
        fill(page, "#temperature", "1")
        fill(page, "#max_tokens", "4")
        find(page, "#files").send_keys(path)
        told(page, "0.png, 24 x 40")
        say(page, "what")
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what"}]
        prompt = [{"role": "user", "content": parts}]
        expected = content(chat(served.url, messages=prompt, temperature=1, max_tokens=4, seed=0))
        assert texts(page, ".answer .said") == [expected]
        press(page, "Say it better")
        page.switch_to.active_element.send_keys("A cat.")
        press(page, "Save")
        until(page, lambda: rows(studio, "pairs"))
        (row,) = rows(studio, "pairs")
        assert row["prompt"] == prompt
        files = Files(studio.studio.outputs, studio.studio.outputs / "kept", 2**20, allow_urls=False)
        example = read_row(row, format_of([row], "marks"), "row 1")  # as a training on it reads it
        image = resolved(example.prompt, files)[0][0]["images"][0]
        assert Path(image.path).read_bytes() == Path(path).read_bytes()
        page.get(f"{studio.base}/#/runs")
        until(page, lambda: not page.find_elements("css selector", ".turn"))
        page.get(f"{studio.base}/#/talk")
        until(page, lambda: find(page, ".mine img").get_attribute("alt") == "0.png")


def test_a_better_answer_is_a_pair_over_the_model_s_and_the_talk_goes_on_from_it(page, script, studio):
    script(["Paris?", "Yes."])
    open_models(page, "demo/sft")
    say(page, "What is the capital of France?")
    press(page, "Say it better")
    box = page.switch_to.active_element
    assert (box.tag_name, box.get_attribute("value")) == ("textarea", "Paris?")
    box.clear()
    press(page, "Save")
    told(page, "Not kept: an empty answer cannot be an example")
    box.send_keys("  Paris.")
    press(page, "Save")
    told(page, "Kept: your words")
    assert texts(page, ".answer .said") == ["  Paris."] and "edited" in texts(page, ".answer .who")[0]
    assert page.switch_to.active_element.text == "Say it better"
    said = {text: [{"role": "assistant", "content": text}] for text in ("  Paris.", "Paris?")}
    first = {"prompt": [{"role": "user", "content": "What is the capital of France?"}], "chosen": said["  Paris."],
             "rejected": said["Paris?"], "how": "edited"}
    assert rows(studio, "pairs") == [first]
    say(page, "Sure?")
    press(page, "Bad")
    until(page, lambda: rows(studio, "thumbs"))
    assert rows(studio, "thumbs")[0]["prompt"] == [*first["prompt"], *said["  Paris."],
                                                   {"role": "user", "content": "Sure?"}]


def test_two_answers_side_by_side_are_scored_and_one_is_better(page, script, studio):
    script(["Paris.", "Yes."], ["It is Paris, of course.", "Certainly."])
    open_models(page, "demo/sft", "demo/ppo", reward="demo/reward")
    say(page, "What is the capital of France?")
    who = texts(page, ".answer .who")
    assert [w.split("score")[0] for w in who] == ["demo-sft", "demo-ppo"] and all("score " in w for w in who)
    left, right = (e.rect for e in page.find_elements("css selector", ".answer"))
    assert left["y"] == right["y"] and left["x"] < right["x"]
    press(page, "This one is better", 0)
    told(page, "demo-sft was better")
    press(page, "This one is better", 1)
    told(page, "demo-ppo was better")
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    found, = rows(studio, "pairs")
    assert (found["prompt"], found["chosen"][0]["content"], found["rejected"][0]["content"], found["how"]) == (
        prompt, "It is Paris, of course.", "Paris.", "compared")
    assert [button(page, "This one is better", i).get_attribute("aria-pressed") for i in (0, 1)] == ["false", "true"]
    say(page, "Sure?")
    press(page, "This one is better", 0)
    until(page, lambda: len(rows(studio, "pairs")) == 2)
    assert rows(studio, "pairs")[1]["prompt"][1]["content"] == "It is Paris, of course."


def test_of_two_equal_answers_none_is_kept_as_better_and_that_is_said(page, script, studio):
    script(["Paris."], ["Paris."])
    open_models(page, "demo/sft", "demo/ppo")
    say(page, "What is the capital of France?")
    press(page, "This one is better", 0)
    told(page, "Nothing is kept: the answers are equal")
    assert not studio.client.get("/api/marks").json()["files"]


def test_answers_to_different_histories_are_no_pair(page, script):
    script(["Paris.", "Yes."], ["Paris!", "Certainly."])
    open_models(page, "demo/sft", "demo/ppo")
    say(page, "What is the capital of France?")
    say(page, "Sure?")
    assert "these are no pair" in texts(page, ".turn:last-of-type .judge")[0]
    assert not [b for b in page.find_elements("css selector", ".turn:last-of-type button") if "better" in b.text[:11]]


def test_a_link_leads_to_a_training_on_what_was_marked(page, script, studio):
    from selenium.webdriver.common.keys import Keys

    open_models(page, "demo/sft")
    name = find(page, "#marks-name")
    name.send_keys(Keys.CONTROL, "a", Keys.NULL, "my marks\t")
    until(page, lambda: "Nothing is marked yet" in find(page, "#marks-counts").text)
    say(page, "What is the capital of France?")
    press(page, "Good")
    until(page, lambda: texts(page, "#marks-counts a") == ["Train on 1 thumb"])
    press(page, "Say it better")
    page.switch_to.active_element.send_keys(" Of course.")
    press(page, "Save")
    until(page, lambda: texts(page, "#marks-counts a") == ["Train on 1 pair", "Train on 1 thumb"])
    links = [a.get_attribute("href") for a in page.find_elements("css selector", "#marks-counts a")]
    queries = [parse_qs(link.partition("#/new?")[2]) for link in links]
    home = studio.studio.home / "marks"
    assert queries == [{"goal": ["prefer"], "stage": ["dpo"], "data": [str(home / "my marks.pairs.jsonl")],
                        "model": ["demo/sft"]},
                       {"goal": ["prefer"], "stage": ["kto"], "data": [str(home / "my marks.thumbs.jsonl")],
                        "model": ["demo/sft"]}]
    name.send_keys(Keys.CONTROL, "a", Keys.NULL, "../x\t")
    press(page, "Say it better")
    press(page, "Save")
    told(page, "Not kept: ")


# -- a model that learns ---------------------------------------------------------------------------------------------


@pytest.fixture
def learner(studio):
    """A model that says what it is told to, and learns nothing but a line for each mark."""
    found, model = Noting(), scripted("demo-sft", "qwen2_5")
    model.lane.engine.answers = [text + ENDS for text in ("Paris?", "It is Paris.", "Yes.")]
    with serving([model], learner=found) as served:
        answering(studio, served)
        yield found


def open_learning(page) -> None:
    find(page, "#talk-learn").click()
    open_models(page, "demo/sft")


def lesson(page, *expected: str) -> None:
    until(page, lambda: texts(page, ".lesson") == [*expected])


def test_each_mark_is_learnt_at_once_with_its_line_below_the_answer(page, learner, studio):
    open_learning(page)
    assert find(page, "#talk-state").text == "Open: demo/sft. Your marks train taught-demo-sft."
    assert not find(page, "#marks-name").is_displayed()
    until(page, lambda: find(page, "#lessons-about").text == "Marks train taught-demo-sft at once. None yet.")
    say(page, "What is the capital of France?")
    assert texts(page, ".hint") == ["tell it what you would have said"]
    press(page, "Say it better")
    page.switch_to.active_element.send_keys(" Paris!")
    press(page, "Save")
    lesson(page, "learnt 1")
    assert texts(page, ".answer .said") == ["Paris? Paris!"] and not texts(page, ".hint")
    find(page, "#second").click()
    until(page, lambda: texts(page, ".answer .said") == ["Paris? Paris!", "It is Paris."])
    until(page, lambda: button(page, "Good")).click()  # an edited answer has none
    lesson(page, "learnt 1", "learnt 2")
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    assert learner.marks == [Mark("text", prompt, "Paris? Paris!", "Paris?"), Mark("thumb", prompt, "It is Paris.")]
    assert texts(page, ".lessons li") == ["Said better What is the capital of France? Paris? Paris!",
                                          "Good What is the capital of France? It is Paris."]
    assert not studio.client.get("/api/marks").json()["files"]  # its run has them
    page.get(f"{studio.base}/#/runs")
    until(page, lambda: not page.find_elements("css selector", ".turn"))
    page.get(f"{studio.base}/#/talk")
    lesson(page, "learnt 1", "learnt 2")
    until(page, lambda: find(page, "#talk-learn").is_selected() and len(texts(page, ".lessons li")) == 2)
    assert find(page, "#talk-taught").get_attribute("value") == "taught-demo-sft"


def test_the_better_of_two_answers_is_a_pair_and_the_talk_goes_on_from_it(page, learner):
    open_learning(page)
    say(page, "What is the capital of France?")
    find(page, "#second").click()
    until(page, lambda: texts(page, ".answer .said") == ["Paris?", "It is Paris."])
    until(page, lambda: button(page, "This one is better", 1)).click()
    lesson(page, "learnt 1")
    told(page, "Kept: this one was better.")
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    assert learner.marks == [Mark("pair", prompt, "It is Paris.", "Paris?")]
    goes_on_from_the_second_answer(page, learner)


def goes_on_from_the_second_answer(page, learner) -> None:
    number = len(learner.marks)
    say(page, "Sure?")
    press(page, "Bad")
    until(page, lambda: len(learner.marks) == number + 1)
    assert [m["content"] for m in learner.marks[-1].prompt] == [
        "What is the capital of France?", "It is Paris.", "Sure?"]


def test_undo_takes_the_last_mark_back_and_the_answer_is_as_before(page, learner):
    open_learning(page)
    say(page, "What is the capital of France?")
    press(page, "Good")
    lesson(page, "learnt 1")
    press(page, "Say it better")
    page.switch_to.active_element.send_keys(" Paris!")
    press(page, "Save")
    lesson(page, "learnt 2")
    find(page, "#lessons-undo").click()
    lesson(page, "learnt 1")
    told(page, "mark 2 is taken back")
    assert texts(page, ".answer .said") == ["Paris?"] and "edited" not in texts(page, ".answer .who")[0]
    assert button(page, "Good").get_attribute("aria-pressed") == "true"
    press(page, "Good")  # again: taken back
    until(page, lambda: learner.marks == [])
    lesson(page)
    until(page, lambda: button(page, "Good").get_attribute("aria-pressed") == "false")
    assert not find(page, "#lessons-undo").is_enabled() and not find(page, "#lessons-save").is_enabled()


def test_undo_leaves_which_answer_was_better_and_a_thumb_takes_back_no_pair(page, learner):
    open_learning(page)
    say(page, "What is the capital of France?")
    find(page, "#second").click()
    until(page, lambda: button(page, "Good", 1)).click()
    lesson(page, "learnt 1")
    press(page, "This one is better", 1)
    lesson(page, "learnt 2")
    press(page, "Good", 1)  # a mark before the last
    told(page, "Only the last mark of the model that is open can be taken back.")
    press(page, "Bad", 0)
    lesson(page, "learnt 3", "learnt 2")
    find(page, "#lessons-undo").click()
    lesson(page, "learnt 2")
    assert [button(page, "This one is better", i).get_attribute("aria-pressed") for i in (0, 1)] == ["false", "true"]
    assert [mark.kind for mark in learner.marks] == ["thumb", "pair"]
    goes_on_from_the_second_answer(page, learner)


def test_the_better_answer_is_compared_with_a_later_one_too_and_with_each_text_once(page, learner):
    open_learning(page)
    say(page, "What is the capital of France?")
    for count in (2, 3, 4):  # the last two are alike
        find(page, "#second").click()
        until(page, lambda count=count: button(page, "Good", count - 1))
        if count != 3:
            press(page, "This one is better", 0)
            told(page, "Kept: this one was better.")
    assert [(mark.answer, mark.other) for mark in learner.marks] == [("Paris?", "It is Paris."), ("Paris?", "Yes.")]
    assert button(page, "This one is better").get_attribute("aria-pressed") == "true"


def test_a_learnt_thumb_is_not_said_to_be_taken_back_when_its_model_is_closed(page, learner):
    open_learning(page)
    say(page, "What is the capital of France?")
    press(page, "Good")
    lesson(page, "learnt 1")
    find(page, "#talk-choice summary").click()
    find(page, "#talk-close").click()
    until(page, lambda: find(page, "#talk-state").text == "No model is open.")
    press(page, "Good")
    until(page, lambda: "Only the last mark of the model that is open" in texts(page, "#talk-told")[0])
    assert button(page, "Good").get_attribute("aria-pressed") == "true" and len(learner.marks) == 1


def test_what_cannot_be_learnt_is_said_below_the_answer_and_saving_names_the_run(page, learner):
    open_learning(page)
    say(page, "What is the capital of France?")
    press(page, "Good")
    lesson(page, "learnt 1")
    press(page, "Bad")
    lesson(page, "Not learnt: this answer is mark 1 already, +; undo takes it back")
    assert button(page, "Good").get_attribute("aria-pressed") == "true"
    find(page, "#lessons-save").click()
    until(page, lambda: texts(page, "#lessons-about") == ["Saved, from 1 mark: taught-demo-sft"])
    assert find(page, "#lessons-about a").get_attribute("href").endswith("#/run/taught-demo-sft")
    say(page, "Sure?")
    press(page, "Good")
    lesson(page, "Not learnt: this answer is mark 1 already, +; undo takes it back", "learnt 2")
    press(page, "Good")
    lesson(page, "Not learnt: this answer is mark 1 already, +; undo takes it back")


def test_where_one_learns_none_is_compared_and_the_name_of_its_run_follows_the_model(page, learner):
    assert find(page, "#talk-model-2").is_displayed() and not find(page, "#talk-taught").is_displayed()
    choose(page, "#talk-model-2", "demo/ppo")
    find(page, "#talk-learn").click()
    assert not find(page, "#talk-model-2").is_displayed()
    for name in ("demo/ppo", "demo/sft"):
        choose(page, "#talk-model-1", name)
        assert find(page, "#talk-taught").get_attribute("value") == f"taught-{name.replace('/', '-')}"
    retype(find(page, "#talk-taught"), "mine\t")
    choose(page, "#talk-model-1", "demo/ppo")
    assert find(page, "#talk-taught").get_attribute("value") == "mine"
    retype(find(page, "#talk-taught"), "../mine\t")
    find(page, "#talk-open").click()
    until(page, lambda: find(page, "#talk-state").text.startswith("a run's name has letters"))


def test_a_cut_answer_that_was_rewritten_is_not_called_cut_until_the_mark_is_undone(page, learner):
    open_learning(page)
    fill(page, "#max_tokens", "2")
    say(page, "What is the capital of France?")
    cut = ["cut at its longest length"]
    assert texts(page, ".answer .note") == cut and "cannot be judged" in texts(page, ".judge")[0]
    press(page, "Say it better")
    page.switch_to.active_element.send_keys("is!")
    press(page, "Save")
    lesson(page, "learnt 1")
    until(page, lambda: texts(page, ".answer .note") == ["edited"])
    assert "cannot be judged" not in texts(page, ".judge")[0]
    find(page, "#lessons-undo").click()
    until(page, lambda: texts(page, ".answer .note") == cut and "cannot be judged" in texts(page, ".judge")[0])


# Between two looks of the page an opening can have begun and failed, on a slow machine.
UNSEEN = """const answered = window.fetch; window.fetch = async (address, options) => {
  for (;;) {
    const reply = await answered(address, options);
    if (address !== "api/talk" || (await reply.clone().json()).state !== "starting") return reply;
  }
}"""


@pytest.mark.parametrize("before", ["", UNSEEN], ids=["seen", "unseen"])
def test_a_name_that_was_refused_goes_with_its_model_and_an_emptied_one_is_suggested(page, learner, studio, before):
    name = find(page, "#talk-taught")
    open_learning(page)
    say(page, "What is the capital of France?")
    find(page, "#talk-choice summary").click()
    retype(name, "demo/ppo\t")
    find(page, "#talk-open").click()
    until(page, lambda: find(page, "#talk-state").text == (
        "demo/ppo has not learnt from marks; give the run that will another name. Open: demo/sft. Your marks train "
        "taught-demo-sft."))
    assert name.get_attribute("value") == "demo/ppo"
    choose(page, "#talk-model-1", "demo/ppo")
    assert name.get_attribute("value") == "taught-demo-ppo"
    retype(name, "\t")
    until(page, lambda: name.get_attribute("value") == "taught-demo-ppo")
    (studio.studio.outputs.parent / "serving").write_text("error: no room")
    page.execute_script(before)
    retype(name, "mine\t")
    find(page, "#talk-open").click()
    until(page, lambda: find(page, "#talk-state").text == "It cannot be opened: no room")
    shown = ("#send", "#message", "#lessons-undo", "#fresh", ".turn")
    assert [find(page, each).is_displayed() for each in shown] == [False, False, False, True, True]
    choose(page, "#talk-model-1", "demo/sft")
    assert name.get_attribute("value") == "taught-demo-sft"
    retype(name, "mine\t")  # as it may be right for this model
    assert name.get_attribute("value") == "mine"


# -- for everybody ---------------------------------------------------------------------------------------------------


@needs_axe
def test_at_every_stage_axe_finds_nothing_and_a_narrow_window_shows_all(page, script):
    def has_no_findings() -> None:
        for scheme in ("light", "dark"):
            assert axe_faults(page, scheme, ALL_IMPACTS) == []

    script(["A" * 300], ["Paris."])
    has_no_findings()
    open_models(page, "demo/sft", "demo/ppo", reward="demo/reward")
    has_no_findings()
    find(page, "#settings summary").click()
    say(page, "What is the capital of France, and why? " + "b" * 200)
    press(page, "Good")
    told(page, "Marked good.")
    press(page, "Say it better", 1)
    has_no_findings()
    with narrow(page):
        assert page.execute_script("return document.documentElement.scrollWidth") <= 360
        left, right = (e.rect for e in page.find_elements("css selector", ".answer"))
        assert left["x"] == right["x"] and left["y"] < right["y"]


def test_by_keys_a_message_has_two_lines_and_an_edit_is_left_or_saved(page, script, studio):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    def type_in(*keys: str) -> None:
        ActionChains(page).send_keys(*keys).perform()

    open_models(page, "demo/sft")
    find(page, "#message").click()
    type_in("What is the capital of France?")
    ActionChains(page).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()
    type_in("Say.", Keys.ENTER)
    until(page, lambda: find(page, "#talk-told").text == "Answered.")
    assert texts(page, ".mine .said") == ["What is the capital of France?\nSay."]
    page.execute_script("arguments[0].focus()", button(page, "Say it better"))
    type_in(Keys.ENTER)
    assert page.switch_to.active_element.tag_name == "textarea"
    type_in(" Of course.", Keys.ESCAPE)  # away
    assert page.switch_to.active_element.text == "Say it better" and rows(studio, "pairs") == []
    type_in(Keys.ENTER, Keys.END, " Yes.", Keys.TAB, Keys.ENTER)
    told(page, "Kept: ")
    assert rows(studio, "pairs")[0]["chosen"][0]["content"] == "Paris. Yes."
