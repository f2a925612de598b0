"""`--stage evaluate --evaluate.labels`: each reward source beside labels, with and without models that answer."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.cli import main
from hybrid_rlhf.report.compare import Method
from hybrid_rlhf.rewards.judge import Grade, Preference
from hybrid_rlhf.training import label_agreement
from tests.factories.judges import judge_server, said
from tests.factories.prm import save_prm
from tests.factories.tiny import save_tiny, tiny_tokenizer

WORDS = ["red", "blue", "green sea", "cat", "a small dog", "fox", "sun", "the moon", "tree", "old book"]
METHOD = Method(0.95, 100, 0)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labels")
    pairs = [{"prompt": f"say {w}", "chosen": w, "rejected": "no no no no no", "wanted": len(w)} for w in WORDS[:8]]
    pairs += [{"prompt": f"say {w}", "chosen": "a very long answer", "rejected": "x", "wanted": 1} for w in WORDS[8:]]
    write(folder / "pairs.jsonl", pairs)
    write(folder / "answers.jsonl", [{"prompt": f"say {w}", "completion": c, "label": c == w, "wanted": len(w)}
                                     for w in WORDS for c in (w, "nothing of it at all")])
    write(folder / "prompts.jsonl", [{"prompt": f"say {w} {i}", "wanted": len(w)} for w in WORDS for i in range(2)])
    (folder / "pay.py").write_text("def letters(completions, wanted):\n"
                                   "    return [-abs(len(c) - w) for c, w in zip(completions, wanted)]\n"
                                   "def some(completions):\n"
                                   "    return [None if c == 'x' else len(c) for c in completions]\n"
                                   "def tokens(completion_ids):\n    return [len(c) for c in completion_ids]\n")
    save_tiny(folder / "one")
    save_tiny(folder / "two", seed=5, initializer_range=0.2)
    return folder


def write(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluate(place, out: str, *words: str) -> int:
    given = [w.replace("PLACE", str(place)) for w in words]
    return main(["--stage", "evaluate", "--output_dir", f"{place}/{out}", "--evaluate.num_resamples", "200",
                 "--model.dtype", "float32", f"--data.cache_dir={place}/cache", *given])


def found_in(place, out: str) -> dict:
    return json.loads((place / out / "evaluate.json").read_text())


def test_functions_are_measured_without_any_model(place, capsys) -> None:
    """letters is right on eight pairs and wrong on the last two ("x" is nearer to 1); some skips "x" and prefers the
    longer answer, which is the rejected one of the other eight."""
    assert evaluate(place, "functions", "--evaluate.labels=PLACE/pairs.jsonl",
                    "--reward.functions=[PLACE/pay.py:letters, PLACE/pay.py:some]") == 0
    found = found_in(place, "functions")
    letters, some = found["agreement"]
    assert found["models"] == [] and found["labels"].endswith("pairs.jsonl (all)")
    assert (letters["source"], letters["items"], letters["failures"]) == ("letters", 10, 0)
    assert letters["accuracy"] == pytest.approx(0.8) and letters["kappa"] == pytest.approx(0.6)
    assert letters["band"] == "moderate" and letters["order_consistency"] is None
    wrong = sum(len(w) < len("no no no no no") for w in WORDS[:8])
    assert some["failures"] == 2 and some["accuracy"] == pytest.approx(1 - wrong / 8)
    page = (place / "functions" / "evaluate.md").read_text()
    assert "| letters | 0.800 [" in page and "Landis and Koch (1977)" in page and "win rate" not in page
    captured = capsys.readouterr()
    assert "evaluate: 10 pairs with labels, of 10 rows" in captured.err and "Only 10 labelled prompts" in captured.out
    assert json.loads((place / "functions" / "run.json").read_text())["metrics"]["agreement/letters"] == 0.8


def test_answers_with_labels_of_their_own(place) -> None:
    assert evaluate(place, "answers", "--evaluate.labels=PLACE/answers.jsonl",
                    "--reward.functions=PLACE/pay.py:letters") == 0
    (row,) = found_in(place, "answers")["agreement"]
    assert row["kind"] == "answers" and row["ranking"] == 1.0 and row["accuracy"] == 1.0 and row["kappa"] == 1.0
    assert row["threshold"] == 0 and "0.000" not in (place / "answers" / "evaluate.md").read_text().split("Ranking")[0]


@pytest.fixture(scope="module")
def reward(place) -> str:
    assert main(["--stage", "reward", "--output_dir", f"{place}/reward", "--model.model_name_or_path", f"{place}/one",
                 f"--data.sources=[{{path: {place}/pairs.jsonl}}]", "--data.split", "null", "--data.max_length", "64",
                 f"--data.cache_dir={place}/cache", "--train.max_steps", "2", "--model.dtype", "float32",
                 "--data.raw", "true"]) == 0
    return f"{place}/reward"


def test_the_stage_2_model_and_a_classifier_agree_as_plain_transformers_says(place, reward) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    assert evaluate(place, "models", "--evaluate.labels=PLACE/pairs.jsonl", "--evaluate.rows=all", "--data.raw=true",
                    f"--roles.reward.model_name_or_path={reward}", f"--reward.models={reward}",
                    "--reward.functions=PLACE/pay.py:tokens") == 0
    rows = found_in(place, "models")["agreement"]
    assert [row["source"] for row in rows] == ["model", "tokens", "reward"]
    judge = AutoModelForSequenceClassification.from_pretrained(f"{reward}/model").eval()
    reader = AutoTokenizer.from_pretrained(f"{reward}/model")

    def score(text: str) -> float:
        ids = torch.tensor([[*reader(text).input_ids, reader.eos_token_id]])
        with torch.no_grad():
            return float(judge(input_ids=ids).logits[0, 0])

    pairs = [json.loads(line) for line in (place / "pairs.jsonl").read_text().splitlines()]
    right = [score(p["prompt"] + p["chosen"]) > score(p["prompt"] + p["rejected"]) for p in pairs]
    assert rows[0]["accuracy"] == rows[2]["accuracy"] == pytest.approx(sum(right) / 10)


def test_a_process_reward_model_is_measured_by_its_scores_of_whole_answers(place) -> None:
    """One step each, so that the score is the probability at the separator behind it. Beside models that answer, the
    answers have a policy's tokens, at which scores of steps are placed."""
    model, tokenizer = save_prm(place / "prm"), tiny_tokenizer()
    assert evaluate(place, "steps", "--evaluate.labels=PLACE/pairs.jsonl", "--reward.models=PLACE/prm") == 0
    pairs = [json.loads(line) for line in (place / "pairs.jsonl").read_text().splitlines()]

    def score(prompt: str, answer: str) -> float:
        parts = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, answer, "\n")]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*parts[0], *parts[1], *parts[2]]])).logits
        return float(logits[0, -1].softmax(-1)[1])

    right = [score(p["prompt"], p["chosen"]) > score(p["prompt"], p["rejected"]) for p in pairs]
    (row,) = found_in(place, "steps")["agreement"]
    assert row["accuracy"] == pytest.approx(sum(right) / 10)
    assert evaluate(place, "placed", "--evaluate.labels=PLACE/pairs.jsonl", "--reward.models=PLACE/prm",
                    "--evaluate.models=[PLACE/one, PLACE/two]", "--data.sources=PLACE/prompts.jsonl", "--data.raw=true",
                    "--data.max_prompt_length=32", "--evaluate.sampling.max_new_tokens=6") == 0
    assert found_in(place, "placed")["agreement"][0]["accuracy"] == row["accuracy"]


def test_a_judge_behind_an_address_is_measured_by_its_comparisons(place) -> None:
    """It prefers the shorter response, and gives no verdict on "no no no no no" beside red: seven pairs are right and
    two, of a long answer and x, are wrong."""
    def shorter(body) -> dict:
        text = body["messages"][1]["content"]
        first, second = re.findall(r"<text-\w+ response \w>\n(.*?)\n</text-", text, re.S)
        better = "A" if len(first) < len(second) else "B"
        return said("Hm." if "red" in (first, second) else json.dumps({"better": better}))

    with judge_server() as server:
        server.answers = [(200, shorter)]
        assert evaluate(place, "judge", "--evaluate.labels=PLACE/pairs.jsonl", f"--reward.judge.url={server.url}",
                        "--reward.judge.mode=pairwise", "--reward.functions=PLACE/pay.py:letters") == 0
        assert len(server.asked) == 2 * 10 + 2  # red's are asked twice
    rows = {row["source"]: row for row in found_in(place, "judge")["agreement"]}
    assert rows["judge"]["failures"] == 1 and rows["judge"]["accuracy"] == pytest.approx(7 / 9)
    assert rows["judge"]["order_consistency"] == 1.0 and rows["letters"]["accuracy"] == 0.8


def test_a_judge_without_any_verdict_was_not_measured_and_ends_with_one_line(place, capsys) -> None:
    """The table of what was measured beside it stands before that."""
    with judge_server() as server:
        server.answers = [(200, said("Hm."))]
        assert evaluate(place, "silent", "--evaluate.labels=PLACE/pairs.jsonl", f"--reward.judge.url={server.url}",
                        "--reward.judge.mode=pairwise", "--reward.functions=PLACE/pay.py:letters") == 2
    told = capsys.readouterr()
    line = next(line for line in told.err.splitlines() if line.startswith("error: "))
    assert "evaluate.labels: judge has no verdict on any of the 10 pairs (the last: the reply cannot be read" in line
    assert "take a judge or a rubric" in line and "Traceback" not in told.err and "10 of 10" in told.out
    assert not (place / "silent" / "evaluate.json").exists()
    (place / "nothing.py").write_text("def skips(completions):\n    return [None] * len(completions)\n")
    assert evaluate(place, "silent", "--evaluate.labels=PLACE/pairs.jsonl",
                    "--reward.functions=PLACE/nothing.py:skips") == 2
    assert "skips has no score on any of the 10 pairs; give a source" in capsys.readouterr().err


def test_what_a_reward_model_was_trained_on_tells_nothing_about_it(place, reward, capsys) -> None:
    """By default only its held-out rows count, those that the stage itself would hold out."""
    from hybrid_rlhf.data.loader import is_held_out

    expected = [w for w in (json.loads(x)["prompt"] for x in (place / "pairs.jsonl").read_text().splitlines())
                if is_held_out(w, 0.4)]
    for model in (f"--roles.reward.model_name_or_path={reward}", f"--reward.models={reward}"):
        assert evaluate(place, "seen", "--evaluate.labels=PLACE/pairs.jsonl", "--data.raw=true", model,
                        "--data.eval_fraction=0.4", "--resume=never") == 0
        assert found_in(place, "seen")["agreement"][0]["items"] == len(expected) < 10
        assert "(held out, for " in capsys.readouterr().err
        assert "pairs.jsonl (held out)" in (place / "seen" / "evaluate.md").read_text()
    assert evaluate(place, "never", "--evaluate.labels=PLACE/pairs.jsonl", "--data.raw=true", model,
                    "--data.eval_fraction=0") == 2


def test_what_a_model_cannot_read_is_a_failure_and_not_the_end(place, reward, capsys) -> None:
    rows = [json.loads(line) for line in (place / "pairs.jsonl").read_text().splitlines()]
    write(place / "long.jsonl", [*rows[:3], {**rows[3], "rejected": "word " * 400}])
    assert evaluate(place, "long", "--evaluate.labels=PLACE/long.jsonl", "--data.raw=true",
                    f"--roles.reward.model_name_or_path={reward}") == 0
    (row,) = found_in(place, "long")["agreement"]
    assert row["items"] == 4 and row["failures"] == 1
    assert "no score for an answer: reward source model: a response of" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "told"), [
    (["--evaluate.labels=PLACE/none.jsonl"], "does not exist"),
    (["--evaluate.labels=PLACE/prompts.jsonl"], "holds no labels"),
    (["--evaluate.labels=PLACE/pairs.jsonl", "--evaluate.models=[PLACE/one]"], "evaluate.models has 1 models"),
    (["--evaluate.labels=PLACE/pairs.jsonl", "--evaluate.num_labels=0"], "evaluate.num_labels is 0"),
    (["--evaluate.num_labels=3"], "evaluate.num_labels is set; it is for evaluate.labels"),
    (["--evaluate.labels=PLACE/pairs.jsonl", "--evaluate.checker=demo"], "evaluate.checker is set; there are only"),
    (["--evaluate.labels=PLACE/pairs.jsonl", "--evaluate.rows=held_out", "--data.eval_fraction=0"],
     "none of its rows is held out"),
    (["--evaluate.labels=PLACE/pairs.jsonl", "--preview"], "--preview shows the prompts"),
    (["--evaluate.labels=PLACE/answers.jsonl", "--reward.judge.url=http://127.0.0.1:9/v1",
      "--reward.judge.mode=pairwise"], "labelled one by one, and judge compares; give pairs, or reward.judge.mode"),
    (["--evaluate.models=[PLACE/one, PLACE/two]", "--data.sources=PLACE/prompts.jsonl", "--data.max_prompt_length=32",
      "--evaluate.sampling.max_new_tokens=6",
      "--reward.judge.url=http://127.0.0.1:9/v1", "--reward.judge.mode=pairwise"], "and evaluate.sampling.num_samples"),
    (["--evaluate.labels=PLACE/pairs.jsonl", "--environment.tools=builtin:calculator"], "environment makes episodes"),
    (["--evaluate.labels=PLACE/answers.jsonl", "--reward.functions=PLACE/pay.py:tokens"], "reads completion_ids"),
])
def test_what_is_wrong_is_one_line(place, capsys, words, told) -> None:
    paid = [] if any(w.startswith("--reward") for w in words) else ["--reward.functions=PLACE/pay.py:some"]
    assert evaluate(place, "wrong", *words, *paid) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert told in line


@dataclass
class FakeJudge:
    """Prefers the longer answer, the first one shown where both are as long; fails where an answer says FAIL."""

    mode: str = "pairwise"
    name: str = "judge"
    asked: list = field(default_factory=list)

    @property
    def config(self) -> SimpleNamespace:
        return SimpleNamespace(mode=self.mode)

    def compare(self, prompts, first, second) -> list[Preference]:
        self.asked.append(len(prompts))
        return [Preference((None, None), failure="FAIL") if "FAIL" in a + b else
                Preference((1.0, 0.0) if len(a) == len(b) else (float(len(a) > len(b)),) * 2)
                for a, b in zip(first, second, strict=True)]

    def grade(self, prompts, completions) -> list[Grade | None]:
        self.asked.append(len(prompts))
        return [None if "FAIL" in c else Grade(min(1.0, len(c) / 10)) for c in completions]


def labels_of(folder, rows):
    write(folder / "rows.jsonl", rows)
    return label_agreement.read(str(folder / "rows.jsonl"), None, 0)


ROWS = [{"prompt": "p", "chosen": "longer", "rejected": "short"}, {"prompt": "q", "chosen": "a", "rejected": "bb"},
        {"prompt": "r", "chosen": "same", "rejected": "SAME"}, {"prompt": "s", "chosen": "FAIL", "rejected": "b"}]


def test_a_judge_that_compares_is_asked_in_both_orders(tmp_path) -> None:
    """One right, one wrong, one that changes with the order (a tie), one failure."""
    judge = FakeJudge()
    (row,) = label_agreement.measure(labels_of(tmp_path, ROWS), [judge], METHOD, batch_size=3)
    assert judge.asked == [3, 1] and (row.failures, row.accuracy) == (1, 0.5)
    assert row.ties == pytest.approx(1 / 3) and row.order_consistency == pytest.approx(2 / 3)


def test_a_judge_that_grades_is_asked_for_grades_and_not_for_what_replaces_failures(tmp_path) -> None:
    judge = FakeJudge("absolute")
    (row,) = label_agreement.measure(labels_of(tmp_path, ROWS), [judge], METHOD)
    assert (row.failures, row.accuracy, row.order_consistency) == (1, 0.5, None) and row.ties == pytest.approx(1 / 3)
    answers = [{"prompt": "p", "completion": "a" * n, "label": n > 6} for n in (1, 4, 5, 8)]
    (row,) = label_agreement.measure(labels_of(tmp_path, answers), [judge], METHOD)
    assert row.threshold == 0.5 and row.accuracy == pytest.approx(0.75)  # the one of 5 letters scores 0.5
