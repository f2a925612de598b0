"""A reward service on this machine, in a thread: batches, retries, and every way to fail."""

from __future__ import annotations

import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.rewards import BadAnswer, part_scores
from hybrid_rlhf.rewards.service import ServiceSource
from tests.factories.judges import judge_server
from tests.factories.rollouts import rollout


@pytest.fixture
def service():
    with judge_server() as state:
        state.answers = [(200, lambda asked: {"scores": [len(c) for c in asked["completions"]]})]
        state.source = lambda **changes: ServiceSource(state.url, **({"back_off": 0.01, "timeout": 5.0} | changes))
        yield state


def test_responses_go_out_in_batches_with_their_prompts_and_come_back_in_order(service):
    asked = [{"role": "user", "content": "q"}]
    made = rollout(("red", "blue cat", "sun", "a", ""), prompt=["p", "q", asked, "r", "s"], answer=[1, 2, 3, 4, 5])
    assert part_scores(service.source(batch_size=2), made).tolist() == [3, 8, 1, 1, 0]  # one message
    assert service.asked == [{"prompts": ["p", "q"], "completions": ["red", "blue cat"]},
                             {"prompts": [asked, "r"], "completions": [[{"role": "assistant", "content": "sun"}], "a"]},
                             {"prompts": ["s"], "completions": [""]}]


def test_a_null_skips_and_no_responses_ask_nothing(service):
    service.answers = [(200, {"scores": [1.5, None, -2]})]
    scores = part_scores(service.source(), rollout())
    assert scores[0] == 1.5 and scores[1].isnan() and scores[2] == -2
    assert service.source().score(rollout().rows(scores.new_tensor([]).long())) == [] and len(service.asked) == 1


def test_a_busy_service_is_asked_again_after_twice_the_wait_each_time(service):
    service.answers = [(503, ""), (429, ""), (200, {"scores": [1, 2, 3]})]
    assert part_scores(service.source(back_off=0.05), rollout()).tolist() == [1, 2, 3]
    waits = [b - a for a, b in zip(service.times, service.times[1:], strict=False)]
    assert waits[0] >= 0.05 and waits[1] >= 0.1 and len(service.asked) == 3


@pytest.mark.parametrize("torn", ["", '{"scores": [1, 2'])
def test_a_service_that_closes_in_the_midst_of_its_answer_is_asked_again(service, torn):
    service.answers, service.tells_length = [(200, torn), (200, '{"scores": [1, 2, 3]}   ')], 24
    assert part_scores(service.source(), rollout()).tolist() == [1, 2, 3] and len(service.asked) == 2
    service.answers, service.asked[:] = [(200, torn)], []
    with pytest.raises(BadAnswer, match=r"after 2 tries, for 3 responses from response 0 on"):
        part_scores(service.source(retries=1), rollout())


@pytest.mark.parametrize("status, answer, message, requests", [
    (500, "", "answered status 500 .* after 3 tries, for 3 responses from response 0 on", 3),
    (404, "", "answered status 404 .*, for 3 responses", 1),
    (200, [1, 2, 3], r'answered \[1, 2, 3\], and not {"scores"', 1),
    (200, {"scores": [1, 2]}, "answered 2 scores, for 3 responses from response 0 on", 1),
    (200, {"scores": [1, "2", 3]}, "score '2' for response 1", 1),
    (200, '{"scores": [1, 2, NaN]}', "score nan for response 2", 1),
    (200, lambda _: time.sleep(0.5), "after 3 tries, for 3 responses", 3),
])
def test_what_cannot_be_trained_on_names_the_service_and_the_response(service, status, answer, message, requests):
    service.answers = [(status, answer)]
    with pytest.raises(BadAnswer, match=r"reward source service.*" + message) as caught:
        part_scores(service.source(retries=2, timeout=0.2 if callable(answer) else 10.0), rollout())
    assert isinstance(caught.value, UserError)
    end = time.monotonic() + 30
    while len(service.asked) < requests and time.monotonic() < end:  # it may read a question that nobody waits for
        time.sleep(0.01)
    assert len(service.asked) == requests


def test_a_service_that_is_not_there_is_said():
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    port = server.server_port
    server.server_close()
    with pytest.raises(BadAnswer, match=rf"http://127.0.0.1:{port}/score: .*refused.* after 2 tries"):
        part_scores(ServiceSource(f"http://127.0.0.1:{port}/score", retries=1, back_off=0.01), rollout())


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/passwd"])
def test_an_address_that_is_none_is_refused_at_the_start(url):
    with pytest.raises(UserError, match=r"reward\.url is"):
        ServiceSource(url)
