"""A judge behind an address: a real server in a thread that answers nonsense, slowly, never, half, or too many."""

from __future__ import annotations

import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.rewards import BadAnswer
from hybrid_rlhf.rewards.judge import JudgeConfig, open_judge
from tests.factories.judges import ONE, judge_server, said

YES, NO = said('fine\n{"ok": "yes"}'), said('{"ok": "no"}')
KEY = "sk-secret-0123456789"


@pytest.fixture
def server():
    with judge_server() as state:
        yield state


def judge(server, **settings):
    source = open_judge(JudgeConfig(**({"url": server.url, "rubric": ONE, "timeout": 5.0} | settings)))
    source.asker.backend.back_off = 0.01
    return source


def by_response(body):
    """Yes to a response that begins with good."""
    return YES if "\ngood" in body["messages"][1]["content"] else NO


def test_each_response_is_a_chat_completion_and_answers_come_back_in_order(server):
    server.answers = [(200, by_response)]
    source = judge(server, api_model="m", max_new_tokens=77, api_options={"top_p": 0.5, "seed": None})
    grades = source.grade(["p"] * 4, ["good 1", "bad", "good 2", "worse"])
    assert [g.score for g in grades] == [1, 0, 1, 0] and grades[0].reason == "fine"
    asked = server.asked[0]
    assert set(server.paths) == {"/v1/chat/completions"}
    assert (asked["model"], asked["max_tokens"], asked["temperature"], asked["top_p"]) == ("m", 77, 0.0, 0.5)
    assert "seed" not in asked and [m["role"] for m in asked["messages"]] == ["system", "user"]


def test_requests_go_out_so_many_at_a_time_and_no_more(server):
    four = threading.Barrier(4)  # none is answered before four are there
    server.answers = [(200, lambda body: (four.wait(30), YES)[1])]
    judge(server, concurrency=4, timeout=60.0).grade(["p"] * 8, [f"x{i}" for i in range(8)])
    assert server.busy == 4 and len(server.asked) == 8


def test_no_question_is_asked_in_the_place_of_one_whose_answer_is_not_kept_yet(server):
    """Or a process that is killed then would have paid for an answer that came and is in no cache."""
    server.answers = [(200, YES)]
    chats = [[{"role": "user", "content": f"x{i}"}] for i in range(6)]
    replies = judge(server, concurrency=2).asker.backend.complete(chats, 8, 0)
    for num_kept in range(3):
        next(replies)
        time.sleep(0.1)  # others would be asked meanwhile
        assert len(server.asked) <= num_kept + 2
    assert len(list(replies)) == 3 and len(server.asked) == 6


def test_the_same_question_is_asked_once_and_never_again(server):
    server.answers = [(200, by_response)]
    source = judge(server)
    assert [g.score for g in source.grade(["p"] * 4, ["good", "bad", "good", "bad"])] == [1, 0, 1, 0]
    assert source.grade(["p"], ["good"])[0].score == 1 and len(server.asked) == 2
    assert source.grade(["q"], ["good"])[0].score == 1 and len(server.asked) == 3  # another prompt


def test_a_folder_keeps_answers_for_the_next_process_and_a_torn_line_costs_one_question(server, tmp_path, capsys):
    server.answers = [(200, by_response)]
    assert [g.score for g in judge(server, cache=str(tmp_path)).grade(["p"] * 2, ["good", "bad"])] == [1, 0]
    again = judge(server, cache=str(tmp_path))
    assert [g.score for g in again.grade(["p"] * 2, ["bad", "good"])] == [0, 1] and len(server.asked) == 2
    other = judge(server, url=f"{server.url}/chat/completions", cache=str(tmp_path),
                  rubric={"items": [{"name": "ok", "question": "Another?"}]})
    other.grade(["p"], ["good"])
    assert len(server.asked) == 3 and set(server.paths) == {"/v1/chat/completions"}  # given with or without its path
    file = tmp_path / "judge.jsonl"
    lines = file.read_text().splitlines()
    assert len(lines) == 3 and oct(file.stat().st_mode & 0o777) == "0o600"
    file.write_text("\n".join([lines[0], json.dumps({"key": json.loads(lines[1])["key"], "reply": "edited"}),
                               lines[2][: len(lines[2]) // 2]]))
    third = judge(server, cache=str(tmp_path))
    assert "1 lines of" in capsys.readouterr().err
    assert sorted(g.score for g in third.grade(["p"] * 2, ["good", "bad"])) == [0, 1] and len(server.asked) == 4
    file.chmod(0o400)


def test_a_reply_that_cannot_be_read_is_asked_for_once_more_with_what_was_wrong_and_then_counted(server, capsys):
    server.answers = [(200, said("I like it")), (200, YES)]
    source = judge(server)
    assert source.grade(["p"], ["x"])[0].score == 1 and source.asker.counts.again == 1
    told = server.asked[1]["messages"]
    assert told[2] == {"role": "assistant", "content": "I like it"} and "no JSON object" in told[3]["content"]
    server.answers = [(200, said("never"))]
    assert source.grade(["p"], ["y"]) == [None] and len(server.asked) == 4  # one second ask, and no third
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "no verdict (the reply cannot be read: there is no JSON object" in line
    assert "it ends 'never'); such a one is left out and counted" in line  # grades are no rewards: nothing is filled in
    server.answers = [(200, YES)]
    assert source.grade(["p"], ["y"])[0].score == 1  # what could not be read is in no cache


@pytest.mark.parametrize("status, headers", [(429, {"Retry-After": "0.2"}), (503, {}), (529, {})])
def test_a_busy_address_is_asked_again(server, status, headers):
    server.answers = [(status, "", headers), (200, YES)]
    assert judge(server).grade(["p"], ["x"])[0].score == 1
    assert server.times[1] - server.times[0] >= (0.2 if headers else 0.01)


def test_a_half_answer_and_one_too_late_are_asked_for_again(server):
    server.answers = [(200, lambda _: time.sleep(4) or YES), (200, YES)]
    assert judge(server, timeout=1.0).grade(["p"], ["x"])[0].score == 1 and len(server.asked) == 2
    server.asked.clear()
    server.answers, server.tells_length = [(200, b"{")], 100
    assert judge(server, http_retries=1).grade(["p"], ["x"]) == [None] and len(server.asked) == 2


@pytest.mark.parametrize("status, answer, what", [
    (200, "no json", "answered no JSON"), (200, {"choices": []}, "no choices"), (200, said(None), "without text"),
    (200, {"choices": [{"message": {"content": "a"}}] * 2}, "answered 2 choices, and one was asked for"),
    (200, {"choices": [{"message": {"content": None, "reasoning_content": "So"}, "finish_reason": "length"}]},
     "nothing within reward.judge.max_new_tokens"),  # the thoughts took all
    (400, {"object": "error", "message": "no field seed", "code": 400}, "no field seed"),  # vLLM
    (400, {"detail": [{"loc": ["body", "seed"], "msg": "no field seed"}]}, "no field seed"),  # FastAPI, Mistral
    (400, b"<p>no field\n\x1b[31m seed</p>", "status 400"),
])
def test_an_answer_that_is_no_completion_is_a_counted_failure_of_that_response(server, status, answer, what, capsys):
    server.answers = [(status, answer), (200, YES)]
    source = judge(server, concurrency=1)
    assert [g and g.score for g in source.grade(["p"] * 2, ["x", "y"])] == [None, 1] and source.asker.counts.failed == 1
    line = capsys.readouterr().err
    assert what in line and len(server.asked) == 2 and line.count("\n") == 1 and "\x1b" not in line


@pytest.mark.parametrize("answer", [
    (400, {"error": {"message": "x" * 140 + KEY}}), (200, {"error": "x" * 65 + KEY})])
def test_no_half_of_a_key_is_told_where_a_message_is_cut(server, answer, monkeypatch, capsys):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server.answers = [answer]
    assert judge(server, api_key_env="JUDGE_KEY").grade(["p"], ["x"]) == [None]
    assert "x" * 60 in (line := capsys.readouterr().err) and KEY[:4] not in line


@pytest.mark.parametrize("status", [401, 404])
def test_a_status_that_says_never_ends_the_run_in_one_line(server, status, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server.answers = [(status, {"error": {"message": f"wrong key {KEY}"}})]
    with pytest.raises(BadAnswer, match=rf"reward source judge at http://127.0.0.1:\d+/v1/chat/completions: answered "
                                        rf"status {status}.*; .* then run the same command again") as caught:
        judge(server, api_key_env="JUDGE_KEY", concurrency=2).grade(["p"] * 20, [f"x{i}" for i in range(20)])
    assert len(server.asked) <= 3 and KEY not in str(caught.value) and "\n" not in str(caught.value)
    assert ("api_key_env" in str(caught.value)) == (status == 401)


def test_an_address_where_nobody_is_ends_the_run_in_one_line():
    gone = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    url = f"http://127.0.0.1:{gone.server_port}/v1"
    gone.server_close()
    source = open_judge(JudgeConfig(url=url, rubric=ONE, http_retries=1, concurrency=1))
    source.asker.backend.back_off = 0.01
    with pytest.raises(BadAnswer, match=r"refused\S*; see to that, then run the same command again"):
        source.grade(["p"] * 9, [f"x{i}" for i in range(9)])
    assert source.budget.calls == 2


def test_an_address_that_never_answers_costs_its_timeouts_and_is_counted(server):
    server.answers = [(200, lambda _: time.sleep(30))]
    began = time.monotonic()
    assert judge(server, timeout=0.1, http_retries=1).grade(["p"] * 3, ["x", "y", "z"]) == [None] * 3
    assert time.monotonic() - began < 20


def test_the_key_goes_into_the_header_and_nowhere_else(server, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("JUDGE_KEY", f" {KEY}\n")
    server.answers = [(200, said(f'{KEY} {{"ok": "yes"}}')), (400, {"error": {"message": f"no {KEY}"}})]
    source = judge(server, api_key_env="JUDGE_KEY", cache=str(tmp_path), concurrency=1)
    grades = source.grade(["p"] * 2, ["x", "y"])
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    everywhere = repr(source) + repr(grades) + capsys.readouterr().err + (tmp_path / "judge.jsonl").read_text() + repr(
        server.asked)
    assert grades[0].reason == "[key]" and grades[1] is None and KEY not in everywhere


def test_a_key_is_not_sent_where_the_address_points_elsewhere(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with judge_server() as other:
        server.answers = [(302, "", {"Location": other.url + "/chat/completions"})]
        with pytest.raises(BadAnswer, match="status 302"):
            judge(server, api_key_env="JUDGE_KEY").grade(["p"], ["x"])
        assert other.headers == []


@pytest.mark.parametrize("value, what", [(None, "is not set"), ("two words", "holds no key")])
def test_a_key_that_is_missing_or_none_is_said_without_it(monkeypatch, value, what):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with pytest.raises(UserError, match=what) as caught:
        open_judge(JudgeConfig(url="http://localhost:1", api_key_env="JUDGE_KEY"))
    assert "two words" not in str(caught.value) and "JUDGE_KEY" not in str(caught.value)


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/passwd", "https://me:secret@host/v1"])
def test_an_address_that_is_none_is_refused_at_the_start_and_no_password_shown(url):
    with pytest.raises(UserError, match=r"reward\.judge\.url is not an http address") as caught:
        open_judge(JudgeConfig(url=url))
    assert "secret" not in str(caught.value)


def test_a_budget_of_calls_ends_the_run_and_what_was_answered_is_kept(server, tmp_path):
    server.answers = [(200, YES)]
    source = judge(server, max_calls=3, concurrency=1, cache=str(tmp_path))
    with pytest.raises(BadAnswer, match=r"reward.judge.max_calls is spent \(3 calls\); raise it, then run"):
        source.grade(["p"] * 5, [f"x{i}" for i in range(5)])
    assert len(server.asked) == 3
    more = judge(server, max_calls=3, cache=str(tmp_path))
    assert len(more.grade(["p"] * 5, [f"x{i}" for i in range(5)])) == 5 and len(server.asked) == 5


def test_tokens_are_paid_and_an_end_to_the_money_is_an_end(server):
    server.answers = [(200, YES)]  # 1000 tokens read, 10 written
    source = judge(server, max_cost=0.005, cost_per_1m_input=2.0, cost_per_1m_output=40.0, concurrency=1)
    source.grade(["p"], ["x"])
    assert source.budget.cost == pytest.approx(1000 * 2e-6 + 10 * 40e-6)  # 0.0024
    with pytest.raises(BadAnswer, match=r"max_cost is spent \(0.0072 of 0.005\); raise it"):
        source.grade(["p"] * 3, ["a", "b", "c"])
    assert len(server.asked) == 3


@pytest.mark.parametrize("options", [{}, {"max_tokens": None}])
def test_requests_in_flight_pass_the_bound_of_the_money_by_less_than_one(server, options):
    """Each costs 0.0024, and they come back together: eight at a time would be asked while 0.0096 are spent."""
    two = threading.Barrier(2)
    server.answers = [(200, lambda body: (two.wait(30), YES)[1])] * 2 + [(200, lambda body: time.sleep(0.05) or YES)]
    source = judge(server, max_cost=0.01, cost_per_1m_input=2.0, cost_per_1m_output=40.0, max_new_tokens=20,
                   api_options=options)
    with pytest.raises(BadAnswer, match=r"max_cost is spent \(0.012 of 0.01\); raise it"):
        source.grade(["p"] * 30, [f"x{i}" for i in range(30)])
    assert source.budget.cost == pytest.approx(0.012) and len(server.asked) == 5 and server.busy > 1


def test_tokens_that_nobody_counts_are_a_quarter_of_the_characters(server):
    server.answers = [(200, {"choices": YES["choices"]})]
    source = judge(server)
    source.grade(["p"], ["x"])
    assert source.budget.num_input == len(json.dumps(server.asked[0]["messages"])) // 4


def tops(*pairs):
    return {"choices": [{"message": {"content": "Yes"}, "logprobs": {"content": [{
        "token": "Yes", "logprob": -0.1, "top_logprobs": [{"token": t, "logprob": math.log(p)} for t, p in pairs]}]}}]}


def test_a_probability_is_of_the_words_among_the_likeliest_tokens(server):
    server.answers = [(200, tops(("Yes", 0.5), (" Yes", 0.1), ("No", 0.2), ("maybe", 0.1)))]
    source = judge(server, score="probability")
    grade = source.grade(["p"], ["x"])[0]
    assert grade.score == pytest.approx(0.6 / 0.8) and grade.mass == pytest.approx(0.8)
    asked = server.asked[0]
    assert (asked["max_tokens"], asked["logprobs"], asked["top_logprobs"]) == (1, True, 20)
    assert source.grade(["p"], ["x"])[0].score == pytest.approx(0.75) and len(server.asked) == 1


@pytest.mark.parametrize("answer, what", [
    (YES, "without top_logprobs"), (tops(("maybe", 0.9)), "none of Yes, No is likely"),
])
def test_an_address_without_probabilities_is_a_counted_failure(server, answer, what, capsys):
    server.answers = [(200, answer)]
    assert judge(server, score="probability").grade(["p"], ["x"]) == [None]
    assert what in capsys.readouterr().err


@pytest.mark.parametrize("found, score", [
    ([("yes", 0.5), ("Yes", 0.01), ("No", 0.3), (" no", 0.1), ("Note", 0.05)], 0.51 / 0.91),
    ([("Y", 0.6), ("No", 0.2), ("", 0.1)], 0.6 / 0.8), ([("Yes", 0.3), ("N", 0.6)], 0.3 / 0.9)])
def test_yes_is_said_in_small_letters_and_in_parts_too(server, found, score):
    server.answers = [(200, tops(*found))]
    assert judge(server, score="probability").grade(["p"], ["x"])[0].score == pytest.approx(score)


def test_a_small_a_is_not_the_letter_of_a_response(server):
    server.answers = [(200, tops(("A", 0.2), ("a", 0.5), ("B", 0.2)))]
    found = judge(server, score="probability", mode="pairwise").compare(["p"], ["x"], ["y"])[0]
    assert found.orders == pytest.approx((0.5, 0.5))


def test_probabilities_of_0_to_10_are_for_a_model_here():
    with pytest.raises(UserError, match=r"make every item of the rubric yes_no, or take reward.judge.model"):
        open_judge(JudgeConfig(url="http://localhost:1", score="probability"))
