"""What people ran into who tried the studio for the first time."""

from __future__ import annotations

import asyncio

import pytest

from hybrid_rlhf.studio.studio import News
from tests.factories.browser import find, needs_browser, texts, until
from tests.factories.studio_runs import make_run

EVALUATION = """# Evaluation

- prompts: rows.jsonl (held out)

## Results

| model | score \\| mean |
|---|---|
| sft | 0.5 [0.4, 0.6] |
| <b>ppo</b> | **0.9** |
"""


@pytest.mark.slow
@needs_browser
def test_the_page_of_an_evaluation_shows_what_it_found(opened, tmp_path):
    run = make_run(tmp_path / "outputs", "compared", "evaluate", steps=0)
    (run.folder / "evaluate.md").write_text(EVALUATION)
    page = opened("#/run/compared")
    until(page, lambda: "sft" in find(page, "#page").text)
    assert texts(page, "#page table thead th")[:2] == ["model", "score | mean"]
    assert texts(page, "#page table tbody td")[:4] == ["sft", "0.5 [0.4, 0.6]", "<b>ppo</b>", "0.9"]
    shown = [each.text for each in page.find_elements("css selector", "a.button, button") if each.is_displayed()]
    assert "Talk" not in shown and "no step yet" not in find(page, "#page").text


@pytest.mark.slow
@needs_browser
def test_thumbs_lead_to_kto_and_pairs_to_dpo(opened):
    for stage in ("kto", "dpo"):
        page = opened(f"#/new?goal=prefer&stage={stage}&data=marks.jsonl")
        page.execute_script("sessionStorage.clear()")
        page = opened(f"#/new?goal=prefer&stage={stage}&data=marks.jsonl")
        until(page, lambda stage=stage, page=page: find(page, "#method").get_attribute("value") == stage)


@pytest.mark.slow
@needs_browser
def test_a_run_that_has_written_nothing_can_be_dropped_stopped_and_changed(opened, queue):
    job = queue.add("7", "queued", run="soon", place=1)
    page = opened("#/run/soon")
    until(page, lambda: find(page, "#page button").text == "Drop")
    find(page, "#page button").click()
    until(page, lambda: queue.asked == [("/api/job/stop", {"id": "7"})])
    job |= {"state": "failed", "place": None, "error": "there is no such model"}
    opened.publish("jobs", {})
    until(page, lambda: find(page, "#page a.button[href='#/new']").is_displayed())
    assert not find(page, "#page button").is_displayed()


def test_tabs_that_listen_end_with_the_studio():
    async def listen() -> list[str]:
        news, heard = News(), []
        stream = news.listen()
        heard.append(await anext(stream))
        news.publish("runs", {})
        heard.append(await anext(stream))
        news.end()
        heard += [text async for text in stream]
        return heard

    found = asyncio.run(asyncio.wait_for(listen(), 5))
    assert found[1:] == ["event: runs\ndata: {}\n\n"]
