"""The server: OpenAI's shapes, the answers that one client alone would get, and what it refuses."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rlhf.inference.named_models import named_models
from hybrid_rlhf.inference.response_text import AnswerText
from hybrid_rlhf.inference.scorer import Scorer
from hybrid_rlhf.inference.server import serve
from hybrid_rlhf.inference.server.served_model import Limits
from hybrid_rlhf.rewards import part_scores
from hybrid_rlhf.rewards.judge.api_backend import ApiBackend
from hybrid_rlhf.rewards.judge.asking import Budget, Failure
from hybrid_rlhf.rewards.judge.local_backend import LocalBackend
from hybrid_rlhf.rewards.service import ServiceSource
from tests.factories.chats import greedy_by_transformers
from tests.factories.judges import in_order
from tests.factories.rollouts import rollout
from tests.factories.tiny import chatml_tokenizer, save_tiny
from tests.inference.server.tiny_server import alone, asked, chat, content, events, running, until

KEY = "correct horse battery"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    return {name: save_tiny(tmp_path_factory.mktemp(name), seed) for seed, name in enumerate(("sft", "ppo"))}


@pytest.fixture(scope="module")
def served(folders, reward_folder):
    scorer = Scorer(reward_folder)
    scorer.open()
    with running(folders, scorer=scorer, limits=Limits(max_body_bytes=20_000)) as found:
        yield found


# --- answers ---------------------------------------------------------------------------------------------------------

def test_a_greedy_answer_is_that_of_transformers(served, folders):
    answer = chat(served.url, "Hello?", temperature=0, max_tokens=20)
    assert content(answer) == greedy_by_transformers(folders["sft"], "Hello?", 20)
    found = answer.json()
    assert (found["object"], found["model"], found["choices"][0]["message"]["role"]) == (
        "chat.completion", "sft", "assistant")
    assert found["usage"]["prompt_tokens"] + found["usage"]["completion_tokens"] == found["usage"]["total_tokens"]


def test_a_stream_is_the_whole_answer_in_pieces(served):
    settings = dict(seed=5, max_tokens=30, n=2, model="ppo")
    whole = chat(served.url, **settings)
    found = events(chat(served.url, **settings, stream=True, stream_options={"include_usage": True}))
    assert all(e["object"] == "chat.completion.chunk" and e["model"] == "ppo" for e in found)
    assert found[-1]["usage"] == whole.json()["usage"]
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for index in range(2):
        parts = [c for e in found for c in e["choices"] if c["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in parts) == content(whole, index)
        assert [c["finish_reason"] for c in parts if c["finish_reason"]] == [
            whole.json()["choices"][index]["finish_reason"]]
    assert content(whole, 0) != content(whole, 1)


@pytest.mark.slow
def test_clients_at_once_get_what_each_would_get_alone_under_its_own_settings(served, folders):
    kinds = [dict(temperature=1.0), dict(temperature=0.7, top_p=0.9), dict(temperature=0),
             dict(temperature=1.3, top_k=20, repetition_penalty=1.2)]
    cases = [(f"question {i}", i, ("sft", "ppo")[i % 2], 5 + 3 * (i % 6), kinds[i % 4]) for i in range(12)]

    def ask(case) -> str:
        text, seed, model, length, kind = case
        return content(chat(served.url, text, seed=seed, model=model, max_tokens=length, **kind))

    with ThreadPoolExecutor(12) as clients:
        answers = list(clients.map(ask, cases))
    for answer, (text, seed, model, length, kind) in zip(answers, cases, strict=True):
        assert answer == alone(folders[model], text, seed, max_new_tokens=length, **kind)
    assert until(lambda: all(m.num_open == 0 for m in served.models))


def test_an_answer_ends_before_a_stop_string(served):
    whole = content(chat(served.url, seed=3, max_tokens=40))
    stop = whole[10:13]
    cut = chat(served.url, seed=3, max_tokens=40, stop=[stop, "no such thing"]).json()
    assert cut["choices"][0]["message"]["content"] == whole[: whole.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] < 40
    streamed = events(chat(served.url, seed=3, max_tokens=40, stop=stop, stream=True))
    assert "".join(c["delta"].get("content", "") for e in streamed for c in e["choices"]) == whole[: whole.index(stop)]


class Letters:
    """A tokenizer whose tokens are characters."""

    def decode(self, ids, **_named) -> str:
        return "".join(map(chr, ids))


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(1, 5))
def test_text_is_cut_at_the_first_stop_string_however_it_comes_in_pieces(text, stops, size):
    answer, out = AnswerText(Letters(), stops, ()), ""
    for start in range(0, len(text) + 1, size):
        out += answer.push([ord(c) for c in text[start : start + size]], is_last=start + size > len(text))
    ends = [text.find(s) + len(s) for s in stops if s in text]  # the stop that is complete first
    first = min((text[: min(ends)].find(s) for s in stops if s in text[: min(ends)]), default=0) if ends else len(text)
    assert out == text[:first]
    assert answer.has_stopped == bool(ends)


def test_models_and_health_are_told(served):
    found = httpx.get(f"{served.url}/v1/models").json()
    assert [m["id"] for m in found["data"]] == ["sft", "ppo"]
    assert httpx.get(f"{served.url}/v1/models/ppo").json()["id"] == "ppo"
    health = httpx.get(f"{served.url}/health").json()
    assert (health["status"], health["reward_model"]) == ("ok", True)


# --- scores ----------------------------------------------------------------------------------------------------------

def test_scores_are_those_of_transformers_and_of_the_reward_service_client(served, reward_folder):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(reward_folder)
    tokenizer = AutoTokenizer.from_pretrained(reward_folder)
    question = [{"role": "user", "content": "What?"}]
    made = rollout(("red", "blue cat", "a longer answer than these"), prompt=["p", question, question])
    texts = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n{a}<|im_end|>"
             for q, a in (("p", "red"), ("What?", "blue cat"), ("What?", "a longer answer than these"))]
    with torch.no_grad():
        want = [float(model(tokenizer(t, return_tensors="pt")["input_ids"]).logits) for t in texts]
    assert part_scores(ServiceSource(f"{served.url}/score"), made).tolist() == pytest.approx(want, abs=1e-5)


def test_many_scores_come_back_in_order_beside_answers(served):
    words = [f"word {i}" for i in range(50)]
    with ThreadPoolExecutor(2) as clients:
        answer = clients.submit(chat, served.url, max_tokens=60, seed=1)
        scores = httpx.post(f"{served.url}/score", json={"prompts": ["p"] * 50, "completions": words}).json()["scores"]
        assert answer.result().status_code == 200
    single = [httpx.post(f"{served.url}/score", json={"prompts": ["p"], "completions": [w]}).json()["scores"][0]
              for w in words[::10]]
    assert scores[::10] == pytest.approx(single, abs=1e-5)
    assert httpx.post(f"{served.url}/score", json={"prompts": [], "completions": []}).json() == {"scores": []}


# --- refusals --------------------------------------------------------------------------------------------------------

BAD = [
    (b"{", 400, "valid JSON"), (b"[]", 400, "object"), (b"{}", 400, "messages"), (b'{"messages": []}', 400, "messages"),
    (b'{"messages": [{"role": "user"}], "model": "x"}', 404, "no model"),
    (json.dumps(asked(temperature=-1)).encode(), 400, "temperature"),
    (json.dumps(asked(max_tokens=0)).encode(), 400, "max_tokens"),
    (json.dumps(asked(n=9)).encode(), 400, "n"),
    (json.dumps(asked(stop=["a"] * 5)).encode(), 400, "stop"), (json.dumps(asked(stop=[""])).encode(), 400, "stop"),
    (json.dumps(asked(tools=[{}])).encode(), 400, "tools"),
    (json.dumps(asked(logprobs=1)).encode(), 400, "logprobs"),
    (json.dumps(asked(logprobs=True, top_logprobs=21)).encode(), 400, "top_logprobs"),
    (json.dumps(asked(top_logprobs=2)).encode(), 400, "needs logprobs true"),
    (json.dumps(asked(logprobs=True, top_logprobs=2, stream=True)).encode(), 400, "in a stream"),
    (json.dumps(asked(logprobs=True, temperature=0.7, stream=True)).encode(), 400, "temperature 0 or 1, not 0.7"),
    (json.dumps(asked(logprobs=True, tools=[{"type": "function", "function": {"name": "f"}}])).encode(), 400,
     "beside tools"),
    (json.dumps({"messages": [{"role": "root", "content": "x"}]}).encode(), 400, "role"),
    (json.dumps({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}).encode(), 400, "text"),
    (json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}).encode(), 400, "data URL"),
    (json.dumps(asked("long " * 300)).encode(), 400, "tokens long"),
    (json.dumps(asked("x" * 30_000)).encode(), 413, "larger"),
]


@pytest.mark.parametrize(("body", "status", "said"), BAD, ids=range(len(BAD)))
def test_a_bad_body_is_an_error_in_openais_shape(body, status, said, served):
    answer = httpx.post(f"{served.url}/v1/chat/completions", content=body,
                        headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert said in error["message"] and "\n" not in error["message"] and len(error["message"]) < 500


def test_the_page_is_served_and_nothing_else_of_the_disk(served):
    page = httpx.get(f"{served.url}/")
    assert page.status_code == 200 and "<title>" in page.text
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    for path in ("/../app.py", "/..%2fapp.py", "/%2e%2e/%2e%2e/%2e%2e/setup.py", "/nothing", "//etc/passwd"):
        answer = httpx.get(f"{served.url}{path}")
        assert (answer.status_code, set(answer.json()["error"])) == (404, {"message", "type", "param", "code"}), path
    assert httpx.post(f"{served.url}/nothing", json={}).status_code in (404, 405)


def test_what_a_foreign_web_page_could_send_is_refused(served):
    url = f"{served.url}/v1/chat/completions"
    assert httpx.post(url, content=json.dumps(asked()), headers={"Content-Type": "text/plain"}).status_code == 415
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Host": "["}):
        assert httpx.post(url, json=asked(), headers=headers).status_code == 403
    assert httpx.post(url, json=asked(max_tokens=1), headers={"Origin": "http://localhost:3000"}).status_code == 200


def test_a_key_is_asked_for_where_there_is_one(folders):
    with running({"a": folders["sft"]}, api_key=KEY, is_local=False) as found:
        url = f"{found.url}/v1/chat/completions"
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": "Bearer"},
                        {"Authorization": f"Basic {KEY}"}, {"Authorization": f"Bearer {KEY}x"}):
            answer = httpx.post(url, json=asked(), headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert httpx.get(f"{found.url}/v1/models").status_code == 401
        right = {"Authorization": f"Bearer {KEY}", "Host": "my.server.example"}
        assert httpx.post(url, json=asked(max_tokens=2), headers=right).status_code == 200
        assert httpx.get(f"{found.url}/health").status_code == 200


# --- the door --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("flags", "reason"), [
    ([], "no model"), (["--model", "x", "--hots", "y"], "did you mean --host?"),
    (["--model", "x", "--host", "0.0.0.0"], "lets other machines in"),
    (["--model", "x", "--port", "99999"], "not a port"), (["--model", "x", "--api_key", "short"], "8 at least"),
    (["--model", "a=x", "a=y"], "two models"), (["--model", "x", "--max_batch", "0"], "must be positive"),
    (["--model", "/nowhere/x"], "does not exist"),
    (["--model", "x", "--host", "127.0.0.256"], "lets other machines in"),
])
def test_wrong_flags_are_refused_in_one_line(flags, reason, capsys):
    assert serve.main([*flags, "--port", "0"] if "--port" not in flags else flags) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), reason in err) == ("", 1, True), err


def test_a_port_in_use_is_refused_before_anything_is_loaded(served, capsys):
    assert serve.main(["--model", "x", "--port", str(served.port)]) == 2
    assert "cannot listen" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "names"), [
    (["outputs/demo/ppo/model"], ["outputs/demo/ppo/model"]), (["a=x", "b=y/z"], ["a", "b"]),
    (["org/name"], ["org/name"])])
def test_names_of_models(given, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # in a checkout where the demo ran there is such a folder
    assert list(named_models(given)) == names


def test_a_folder_called_model_is_named_after_its_run(tmp_path):
    (tmp_path / "ppo" / "model").mkdir(parents=True)
    assert list(named_models([str(tmp_path / "ppo" / "model")])) == ["ppo"]


# --- a judge behind this server ---------------------------------------------------------------------------------------

CHATS = [[{"role": "system", "content": "judge"}, {"role": "user", "content": text}]
         for text in ("say cat", "the moon is red", "a", "once upon a time", "fox", "You are welcome!")]


def test_replies_by_address_are_those_of_the_model_itself(tmp_path):
    folder = save_tiny(tmp_path / "judge", seed=3, initializer_range=0.3)
    budget = Budget()
    with running({"judge": folder}) as server:
        backend = ApiBackend(f"{server.url}/v1", "judge", budget, concurrency=3, retries=1, timeout=60.0)
        by_address = in_order(backend.complete(CHATS, 12, 0))
        nobody = in_order(ApiBackend(f"{server.url}/v1", "nobody", Budget(), retries=0).complete(CHATS[:1], 12, 0))
        long = in_order(backend.complete([[{"role": "user", "content": "fox " * 500}]], 12, 0))
    own = LocalBackend(folder, Budget(), dtype="float32")
    assert by_address == in_order(own.complete(CHATS, 12, 0))
    assert isinstance(nobody[0], Failure) and nobody[0].is_fatal and "404" in nobody[0].what
    assert isinstance(long[0], Failure) and not long[0].is_fatal and "400" in long[0].what
    assert (budget.calls, budget.num_input) == (7, own.budget.num_input)


def test_probabilities_by_address_are_those_of_the_model_itself(tmp_path):
    """Of words that are one token each and among the twenty likeliest, for an address tells no others."""
    folder = save_tiny(tmp_path / "judge", seed=3, initializer_range=0.3)
    own, tokenizer = LocalBackend(folder, Budget(), dtype="float32"), chatml_tokenizer()
    texts = {tokenizer.decode([i]) for i in range(4, len(tokenizer))}
    singles = sorted(t for t in texts if t.isascii() and t.isalnum() and len(tokenizer(t).input_ids) == 1)
    with running({"judge": folder}) as server:
        backend = ApiBackend(f"{server.url}/v1", "judge", Budget(), retries=1, timeout=60.0)
        for chat in CHATS[:3]:
            chances = in_order(own.choose([chat], singles))[0]
            words = sorted(singles, key=dict(zip(singles, chances, strict=True)).get)[-2:]
            by_address, here = in_order(backend.choose([chat], words))[0], in_order(own.choose([chat], words))[0]
            told = [(a, b) for a, b in zip(by_address, here, strict=True) if a > 0]
            assert told, words
            assert all(a == pytest.approx(b, rel=1e-3) for a, b in told)
