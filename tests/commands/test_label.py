"""`hybrid-rlhf label` against a judge behind an address: which pairs are written, what is asked again, what is told."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.cli import main
from hybrid_rlhf.data.labels import read_labels
from hybrid_rlhf.data.sources import Source
from hybrid_rlhf.training import scored_answers
from tests.factories.judges import judge_server, said
from tests.factories.tiny import save_tiny

ROOT = Path(__file__).resolve().parents[2]
ROWS = [{"prompt": f"say {w}", "completions": [w, w * 2, "x"], "answer": w} for w in ("red", "blue", "green", "old")]


@pytest.fixture
def server():
    with judge_server() as state:
        state.answers = [(200, longer)]
        yield state


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model") / "one")


def shown(body) -> list[str]:
    """The responses that a question shows."""
    return re.findall(r"<text-\w+ response ?\w?>\n(.*?)\n</text-", body["messages"][1]["content"], re.S)


def longer(body) -> dict:
    """A judge who prefers the longer response; of three together it says how long each is."""
    texts = shown(body)
    if len(texts) == 1:
        return said(json.dumps({"ok": min(10, len(texts[0]))}))
    if '"better"' not in body["messages"][1]["content"]:
        return said(json.dumps({"ABC"[i]: min(1, len(text) / 20) for i, text in enumerate(texts)}))
    return said(json.dumps({"better": "A" if len(texts[0]) > len(texts[1]) else "B"}))


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pairs_of(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def run(folder: Path, server, *words: str, rows=None, judge: bool = True) -> int:
    """The command on `rows` with its output in out.jsonl."""
    if not (folder / "rows.jsonl").exists():
        write(folder / "rows.jsonl", ROWS if rows is None else rows)
    asked = ["--judge.url", server.url, "--judge.http_retries", "0"] if judge else []
    return main(["label", "--data", f"{folder}/rows.jsonl", "--output", f"{folder}/out.jsonl", *asked, *words])


def test_every_two_responses_are_compared_in_both_orders_and_written_as_preferences(tmp_path, server, capsys) -> None:
    assert run(tmp_path, server) == 0
    found = pairs_of(tmp_path / "out.jsonl")
    assert len(server.asked) == 4 * 3 * 2 and len(found) == 12
    assert all(len(row["chosen"]) > len(row["rejected"]) for row in found)
    assert found[0] == {"prompt": "say red", "chosen": "redred", "rejected": "red", "answer": "red",
                        "score_chosen": 1.0, "score_rejected": 0.0}
    assert len(read_labels(Source(str(tmp_path / "out.jsonl")), None, 0).pairs) == 12
    out = capsys.readouterr().out
    assert "12 pairs kept of 12 that judge judged, of 4 prompts; 0 ties, 0 without a verdict" in out
    assert "0 of 12 verdicts (0.0%) changed with the order" in out
    assert "24 calls to the judge (0 of 24 questions were answered before), 24,000 tokens read, 240 written" in out


def test_what_is_written_is_trained_on_by_dpo(tmp_path, server, model) -> None:
    assert run(tmp_path, server, "--margin", "true") == 0
    assert {row["margin"] for row in pairs_of(tmp_path / "out.jsonl")} == {1.0}
    assert main(["--stage", "dpo", "--output_dir", f"{tmp_path}/dpo", "--model.model_name_or_path", model,
                 "--data.sources", f"{tmp_path}/out.jsonl", "--train.max_steps", "1", "--data.max_length", "64",
                 "--train.per_device_train_batch_size", "2", f"--data.cache_dir={tmp_path}/cache"]) == 0


def test_a_judge_that_takes_whatever_comes_first_labels_nothing(tmp_path, server, capsys) -> None:
    server.answers = [(200, said('{"better": "A"}'))]
    assert run(tmp_path, server) == 2
    told = "no pair has a better response (12 ties, 0 without a verdict, of 12, 12 changed with the order of the two)"
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_a_judge_that_mostly_follows_the_order_is_told_of(tmp_path, server, capsys) -> None:
    """About red it prefers the longer response, else what comes first: nine of twelve verdicts change."""
    server.answers = [(200, lambda body: longer(body) if "say red" in str(body) else said('{"better": "A"}'))]
    assert run(tmp_path, server) == 0 and len(pairs_of(tmp_path / "out.jsonl")) == 3
    out = capsys.readouterr().out
    assert "9 of 12 verdicts (75.0%) changed with the order" in out and "warning: so many verdicts follow" in out


def test_failures_and_ties_are_left_out_and_counted(tmp_path, server, capsys) -> None:
    """Nonsense about "x" (two of three pairs of each prompt), a tie about red."""
    def answer(body) -> dict:
        if "x" in shown(body):
            return said("I like both.")
        return said('{"better": "tie"}') if "red" in shown(body) else longer(body)

    server.answers = [(200, answer)]
    assert run(tmp_path, server) == 0
    assert [row["chosen"] for row in pairs_of(tmp_path / "out.jsonl")] == ["blueblue", "greengreen", "oldold"]
    assert "3 pairs kept of 12 that judge judged, of 4 prompts; 1 ties, 8 without a verdict" in capsys.readouterr().out


def test_a_judge_without_one_verdict_is_not_asked_about_all_prompts(tmp_path, server, capsys) -> None:
    server.answers = [(400, {"error": {"message": "no field seed"}})]
    assert run(tmp_path, server, "--batch_size", "2") == 2
    told = capsys.readouterr().err
    assert "none of the first 6 pairs has a verdict" in told and "(2 of 4 prompts are judged;" in told
    assert len(server.asked) == 2 * 3 * 2 and "no field seed" in told  # of the 24 questions
    server.answers = [(200, longer)]
    assert run(tmp_path, server, "--batch_size", "2") == 0 and len(pairs_of(tmp_path / "out.jsonl")) == 12


def test_the_same_command_asks_nothing_again_and_writes_the_same(tmp_path, server) -> None:
    assert run(tmp_path, server) == 0
    first, count = (tmp_path / "out.jsonl").read_bytes(), len(server.asked)
    assert run(tmp_path, server) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == first and len(server.asked) == count


def test_a_judge_that_stops_leaves_no_output_and_the_rest_is_asked_later(tmp_path, server, capsys) -> None:
    """Two prompts of six questions each are answered; then the key is refused."""
    good = [(200, longer)] * 12
    server.answers = [*good, (401, "no")]
    assert run(tmp_path, server, "--batch_size", "2", "--judge.concurrency", "1") == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("error: reward source judge at http") and "2 of 4 prompts are judged" in told
    assert not (tmp_path / "out.jsonl").exists()
    asked = len(server.asked)
    server.answers = [(200, longer)]
    assert run(tmp_path, server) == 0
    assert len(server.asked) == asked + 12 and len(pairs_of(tmp_path / "out.jsonl")) == 12


def test_a_budget_that_is_spent_writes_what_is_judged_where_that_is_asked_for(tmp_path, server, capsys) -> None:
    assert run(tmp_path, server, "--batch_size", "1", "--judge.max_calls", "13", "--partial", "true") == 0
    assert {row["prompt"] for row in pairs_of(tmp_path / "out.jsonl")} == {"say red", "say blue"}
    assert "warning: 2 of 4 prompts are judged, for reward source judge" in capsys.readouterr().err
    assert run(tmp_path, server) == 0 and len(pairs_of(tmp_path / "out.jsonl")) == 12
    assert len(server.asked) <= 24


def test_a_judge_may_grade_or_rank(tmp_path, server, capsys) -> None:
    rubric = "--judge.rubric={items: [{name: ok, question: Is it long?, kind: 0-10}]}"
    assert run(tmp_path, server, "--judge.mode", "absolute", rubric, "--keep", "best_worst") == 0
    found = pairs_of(tmp_path / "out.jsonl")
    assert [(row["chosen"], row["rejected"]) for row in found] == [(r["completions"][1], "x") for r in ROWS]
    assert [row["score_chosen"] for row in found] == [0.6, 0.8, 1.0, 0.6] and len(server.asked) == 12
    assert run(tmp_path, server, "--judge.mode", "absolute", rubric, "--min_margin", "0.45") == 0
    found = [(row["chosen"], row["rejected"]) for row in pairs_of(tmp_path / "out.jsonl")]
    assert found == [("redred", "x"), ("blueblue", "x"), ("greengreen", "green"), ("greengreen", "x"), ("oldold", "x")]
    assert len(server.asked) == 12 and run(tmp_path, server, "--judge.mode", "ranking") == 0
    assert len(pairs_of(tmp_path / "out.jsonl")) == 12 and len(server.asked) == 16
    assert "changed with the order" not in capsys.readouterr().out


PROMPTS = [{"prompt": f"say {w}", "answer": w} for w in ("red", "blue", "green sea", "old")]


def sampled(folder: Path, server, model: str, *words: str) -> int:
    return run(folder, server, "--model", model, "--max_new_tokens", "6", "--dtype", "float32", *words, rows=PROMPTS)


@pytest.mark.slow
def test_samples_of_a_model_are_judged_and_drawn_once(tmp_path, server, model, monkeypatch, capsys) -> None:
    assert sampled(tmp_path, server, model, "--num_samples", "3") == 0
    found = pairs_of(tmp_path / "out.jsonl")
    kept = pairs_of(tmp_path / "out.jsonl.work" / "samples.jsonl")
    samples = {PROMPTS[row["number"]]["prompt"]: row["responses"] for row in kept[1:]}
    assert set(samples) == {row["prompt"] for row in PROMPTS} and all(len(s) == 3 for s in samples.values())
    assert found and all({row["chosen"], row["rejected"]} <= set(samples[row["prompt"]]) for row in found)
    assert {row["answer"] for row in found} <= {row["answer"] for row in PROMPTS}
    assert "samples were cut at 6 tokens" in capsys.readouterr().out
    first = (tmp_path / "out.jsonl").read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    assert sampled(other, server, model, "--num_samples", "3") == 0
    assert (other / "out.jsonl").read_bytes() == first  # the seed says all

    (tmp_path / "out.jsonl").unlink()
    place = tmp_path / "out.jsonl.work" / "samples.jsonl"
    lines = place.read_bytes().splitlines(keepends=True)
    place.write_bytes(b"".join(lines[:3]) + lines[3][:9])  # killed in the midst of the third prompt's line
    drawn, plain = [], scored_answers.open_actor

    def watched(*given):
        actor = plain(*given)
        generate = actor.engine.generate
        actor.engine.generate = lambda ids, *rest, **more: drawn.extend(more["numbers"]) or generate(ids, *rest, **more)
        return actor

    monkeypatch.setattr(scored_answers, "open_actor", watched)
    assert sampled(tmp_path, server, model, "--num_samples", "3") == 0
    assert drawn == [6, 7, 8, 9, 10, 11] and (tmp_path / "out.jsonl").read_bytes() == first
    assert sampled(tmp_path, server, model, "--num_samples", "3") == 0 and len(drawn) == 6


def test_samples_of_other_settings_are_not_taken(tmp_path, server, model, capsys) -> None:
    assert sampled(tmp_path, server, model) == 0
    assert sampled(tmp_path, server, model, "--temperature", "0.5") == 2
    assert "holds samples of other settings (sampling); remove it, or give another --output" in capsys.readouterr().err


def test_samples_meet_the_responses_of_the_data_where_both_are_named(tmp_path, server, model) -> None:
    assert run(tmp_path, server, "--model", model, "--max_new_tokens", "6", "--num_samples", "1", "--dtype", "float32",
               "--responses", "answer", rows=[{"prompt": "say red", "answer": "a very, very, very long answer"}]) == 0
    (row,) = pairs_of(tmp_path / "out.jsonl")
    assert row["chosen"] == "a very, very, very long answer" and row["rejected"] != row["chosen"]


def test_prompts_that_are_too_long_are_counted(tmp_path, server, model, capsys) -> None:
    rows = [*PROMPTS, {"prompt": "word " * 200}]
    assert run(tmp_path, server, "--model", model, "--max_new_tokens", "6", "--dtype", "float32",
               "--max_prompt_length", "40", rows=rows) == 0
    assert "1 left out: a prompt that is too long to be answered" in capsys.readouterr().out


def test_a_reward_model_judges_as_plain_transformers_does(tmp_path, model) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from tests.factories.tiny import tiny_scalar_model, tiny_tokenizer

    tiny_scalar_model(seed=3).save_pretrained(tmp_path / "rm")
    tiny_tokenizer().save_pretrained(tmp_path / "rm")
    assert run(tmp_path, None, "--reward_model", f"{tmp_path}/rm", judge=False) == 0
    judge = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    reader = AutoTokenizer.from_pretrained(tmp_path / "rm")
    rows = pairs_of(tmp_path / "out.jsonl")
    assert len(rows) == 12
    for row in rows:
        for side in ("chosen", "rejected"):
            ids = torch.tensor([[*reader(row["prompt"] + row[side]).input_ids, reader.eos_token_id]])
            with torch.no_grad():
                assert row[f"score_{side}"] == pytest.approx(float(judge(input_ids=ids).logits[0, 0]), abs=1e-4)
        assert row["score_chosen"] > row["score_rejected"]


@pytest.mark.slow
def test_a_kill_loses_no_answer_that_had_come(tmp_path, server, capsys) -> None:
    """A process of its own is killed while the second prompt's questions are answered slowly."""
    server.answers = [(200, longer)] * 6 + [(200, lambda body: time.sleep(0.4) or longer(body))]
    write(tmp_path / "rows.jsonl", ROWS)
    words = ["label", "--data", "rows.jsonl", "--output", "out.jsonl", "--judge.url", server.url, "--batch_size", "1",
             "--judge.concurrency", "1"]
    process = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *words], cwd=tmp_path,
                               env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(server.asked) < 8 and time.monotonic() < deadline:
        time.sleep(0.02)
    num_asked = len(server.asked)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out.jsonl").exists() and num_asked >= 8
    server.answers = [(200, longer)]
    assert run(tmp_path, server) == 0
    told = re.search(r"(\d+) calls to the judge \((\d+) of 24 questions", capsys.readouterr().out)
    num_calls, num_known = map(int, told.groups())
    assert num_calls + num_known == 24 and num_known >= num_asked - 1  # one was under way, and all before it are known
    assert len(pairs_of(tmp_path / "out.jsonl")) == 12


BAD = [
    ([], "no data; give --data"),
    (["--data", "ROWS"], "output is None; give --output FILE.jsonl"),
    (["--data", "ROWS", "--output", "x.csv"], "output is x.csv"),
    (["--data", "ROWS", "--output", "OUT"], "no judge; give --judge.model"),
    (["--data", "ROWS", "--output", "OUT", "--judge.url", "URL", "--reward_model", "x"], "both given"),
    (["--data", "ROWS", "--output", "OUT", "--judge.url", "URL", "--judge.mode", "pair"],
     "judge.mode is 'pair'; choose absolute, pairwise, ranking"),
    (["--data", "ROWS", "--output", "OUT", "--judge.url", "URL", "--judge.on_failure", "stop"],
     "judge.on_failure is not used by hybrid-rlhf label; pairs without a verdict"),
    (["--data", "ROWS", "--output", "OUT", "--judge.url", "URL", "--judge.rubric", "{items: []}"],
     "judge.rubric: items"),
    (["--data", "ROWS", "--output", "OUT", "--judge.url", "URL", "--judge.rul", "1"], "did you mean judge.url?"),
    (["--data", "NONE", "--output", "OUT", "--judge.url", "URL"], "does not exist"),
    (["--data", "PROMPTS", "--output", "OUT", "--judge.url", "URL"], "no prompt has two different responses"),
    (["--data", "ROWS", "--output", "OUT", "--judge.url", "URL", "--responses", "reply"], "has no column reply"),
    (["--data", "ROWS", "--output", "ROWS", "--judge.url", "URL"], "exists, and is not what this command has written"),
    (["--data", "ROWS", "--output", "OUT", "--judge.url", "URL", "--model", "MODEL", "--num_samples", "1"],
     "num_samples is 1, and a pair has two"),
    (["--data", "ROWS", "--output", "OUT", "--judge.url", "URL", "--model", "MODEL", "--temperature", "0"],
     "temperature is 0, so all samples"),
    (["--data", "ROWS", "--output", "OUT", "--judge.url", "URL", "--model", "MODEL", "--max_new_tokens", "300"],
     "max_new_tokens is 300, and"),
    (["--data", "ROWS", "--output", "OUT", "--judge.url", "URL", "--model", "NONE"], "NONE"),
    (["--data", "ROWS", "--output", "OUT", "--reward_model", "MODEL"], "is not a sequence-classification model"),
    (["--data", "ROWS", "--output", "OUT", "--judge.url", "http://127.0.0.1:9/v1", "--judge.http_retries", "0"],
     "0 of 4 prompts are judged"),
    (["--data", "ROWS", "--output", "OUT", "--judge.url", "URL", "--keep", "some"], "keep is 'some'"),
]


@pytest.mark.parametrize(("words", "told"), BAD, ids=[told for _, told in BAD])
def test_bad_input_is_one_line_and_leaves_no_output(tmp_path, server, model, capsys, words, told) -> None:
    places = {"ROWS": write(tmp_path / "rows.jsonl", ROWS), "PROMPTS": write(tmp_path / "prompts.jsonl", PROMPTS),
              "OUT": f"{tmp_path}/out.jsonl", "URL": server.url, "MODEL": model, "NONE": f"{tmp_path}/none.jsonl"}
    assert main(["label", *(places.get(word, word) for word in words)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and (told if told != "NONE" else places["NONE"]) in lines[0]
    assert "reward.judge" not in lines[0]
    assert not (tmp_path / "out.jsonl").exists() and pairs_of(tmp_path / "rows.jsonl") == ROWS
