"""`--stage evaluate` by the launcher: two models on the same held-out prompts, judged as training is paid."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from hybrid_rlhf.cli import main
from hybrid_rlhf.training import scored_answers
from tests.factories.judges import judge_server, said
from tests.factories.tiny import save_tiny

WORDS = [f"say {a} {b}" for a in ("red", "blue", "green", "cat") for b in ("dog", "fox", "sun", "moon", "tree")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": w, "wanted": 5}) + "\n" for w in WORDS))
    (folder / "pay.py").write_text("def letters(completions, wanted, **rest):\n"
                                   "    return [-abs(len(c) - w) for c, w in zip(completions, wanted)]\n"
                                   "def vowels(completions):\n"
                                   "    return [sum(x in 'aeiou' for x in c) for c in completions]\n")
    save_tiny(folder / "one")
    save_tiny(folder / "two", seed=5, initializer_range=0.2)
    shutil.copytree(folder / "one", folder / "copy")
    return folder


def evaluated(place, out: str, models: str, *more: str) -> dict:
    given = [w.replace("PLACE", str(place)) for w in (
        "--data.sources=[{path: PLACE/prompts.jsonl}]", f"--evaluate.models=[{models}]", *more)]
    assert main(["--stage", "evaluate", "--output_dir", f"{place}/{out}", *given, "--data.split", "null",
                 f"--data.cache_dir={place}/cache", "--data.max_prompt_length", "32", "--evaluate.rows", "all",
                 "--data.raw", "true",
                 "--evaluate.sampling.max_new_tokens", "8", "--model.dtype", "float32",
                 "--evaluate.num_resamples", "200"]) == 0
    return json.loads((place / out / "evaluate.json").read_text())


PAID = ["--reward.functions=PLACE/pay.py:letters"]


@pytest.mark.slow
def test_a_copy_is_not_told_apart_and_other_weights_are(place, capsys) -> None:
    found = evaluated(place, "three", "PLACE/one, PLACE/copy, other=PLACE/two", *PAID)
    one, copy, other = found["models"]
    assert [m["model"] for m in found["models"]] == ["one", "copy", "other"]
    assert copy["score"] == one["score"] and copy["win_rate"] == 0.5 and copy["ties"] == 1.0 and copy["kl"] == 0
    assert abs(one["kl"]) < 1e-6 and other["kl"] > 0.1 and other["score_gain"] != 0
    assert found["prompts"] == "20 (all)" and found["reward_sources"] == "letters"
    for each in found["examples"]:  # what the function says of the answers shown
        for answer in each["answers"].values():
            assert answer["score"] == -abs(len(answer["completion"]) - 5)
    out = capsys.readouterr().out
    assert "copy is not told apart by who wins against one: 50.0% of the prompts" in out
    assert (place / "three" / "evaluate.md").read_text().count("| other |") >= 1


def test_answers_that_the_judge_gave_no_verdict_on_are_counted_where_the_score_is_read(place, capsys) -> None:
    """They are given the mean of others, and the score of a model alone does not show that."""
    replies = [said('{"ok": "yes"}')] * 20 + [said("nonsense"), said('{"ok": "yes"}')] * 10  # one, then two
    with judge_server() as server:
        server.answers = [(200, reply) for reply in replies]
        found = evaluated(place, "judged", "PLACE/one, PLACE/two", f"--reward.judge.url={server.url}",
                          "--reward.judge.retries=0", "--reward.judge.concurrency=1",
                          "--reward.judge.rubric={items: [{name: ok, question: Is it?}]}")
    lost = found["answers_without_a_verdict_of_the_judge"]
    asked = len(server.asked)  # answers that are the same are asked about once
    assert lost.startswith("one 0.0%, two ") and "two 0.0%" not in lost and "that of others" in lost and asked > 20
    assert [m["score"] for m in found["models"]] == [1, 1]
    assert f"answers without a verdict of the judge: {lost}" in capsys.readouterr().err
    assert lost.replace("(", "").split()[1] in (place / "judged" / "evaluate.md").read_text()


def test_kl_is_that_of_plain_transformers_on_the_same_tokens(place, monkeypatch) -> None:
    from transformers import AutoModelForCausalLM

    kept, judge = [], scored_answers.judge
    monkeypatch.setattr(scored_answers, "judge", lambda rollout, *rest: (judge(rollout, *rest), kept.append(rollout)))
    found = evaluated(place, "kl", "PLACE/one, PLACE/two", *PAID, "--evaluate.batch_size", "12")
    assert [len(r) for r in kept] == [12, 8, 12, 8]
    models = [AutoModelForCausalLM.from_pretrained(place / name).eval() for name in ("two", "one")]
    total = 0.0
    for rollout in kept[2:]:
        for i, ids in enumerate(rollout.prompts.ids):
            response = rollout.response_ids[i][rollout.action_mask[i]].tolist()
            whole = torch.tensor([ids + response])
            with torch.no_grad():
                logs = [m(whole).logits[0, len(ids) - 1 : -1].log_softmax(-1) for m in models]
            picked = [x.gather(1, torch.tensor(response)[:, None]).sum() for x in logs]
            total += float(picked[0] - picked[1])
    assert found["models"][1]["kl"] == pytest.approx(total / 20, abs=1e-4)


def test_several_sources_and_answers_are_weighted_and_told_apart_and_again_when_asked_again(place, capsys) -> None:
    given = ("mixed", "PLACE/one, PLACE/two", "--reward.functions=[PLACE/pay.py:letters, PLACE/pay.py:vowels]",
             "--reward.weights=[0.5, 2.0]", "--evaluate.sampling.num_samples", "3")
    found = evaluated(place, *given)
    assert evaluated(place, *given) == found and "nothing to do" not in capsys.readouterr().err
    for model in found["models"]:
        assert model["score"] == pytest.approx(0.5 * model["sources"]["letters"] + 2 * model["sources"]["vowels"])
    assert found["answers_per_prompt"] == 3


@pytest.fixture(scope="module")
def reward(place) -> str:
    """A finished reward run beside the evaluations' folders."""
    (place / "pairs.jsonl").write_text("".join(json.dumps({"prompt": w, "chosen": "yes", "rejected": "no"}) + "\n"
                                               for w in WORDS))
    assert main(["--stage", "reward", "--output_dir", f"{place}/reward", "--model.model_name_or_path", f"{place}/one",
                 f"--data.sources=[{{path: {place}/pairs.jsonl}}]", "--data.split", "null", "--data.max_length", "64",
                 f"--data.cache_dir={place}/cache", "--train.max_steps", "2", "--model.dtype", "float32",
                 "--data.raw", "true"]) == 0
    return f"{place}/reward"


@pytest.mark.slow
def test_a_model_with_other_tokens_is_judged_by_its_words_and_has_no_kl(place, reward) -> None:
    """Plain transformers on the words gives the scores; the reward model's tokens are not the policy's."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from tests.factories.tiny import tiny_tokenizer

    shutil.copytree(place / "two", place / "foreign", dirs_exist_ok=True)
    tokenizer = tiny_tokenizer(290)
    tokenizer.chat_template = AutoTokenizer.from_pretrained(place / "one").chat_template
    tokenizer.save_pretrained(place / "foreign")
    found = evaluated(place, "tokens", "PLACE/one, PLACE/foreign")
    assert abs(found["models"][0]["kl"]) < 1e-6 and found["models"][1]["kl"] is None
    judge = AutoModelForSequenceClassification.from_pretrained(place / "reward" / "model").eval()
    reader = AutoTokenizer.from_pretrained(place / "reward" / "model")
    for each in found["examples"]:
        answer = each["answers"]["foreign"]
        ids = torch.tensor([reader(each["prompt"] + answer["completion"]).input_ids])  # cut at 8 tokens: no EOS
        with torch.no_grad():
            assert answer["score"] == pytest.approx(float(judge(input_ids=ids).logits[0, 0]), abs=1e-4)


def test_the_stage_2_model_judges_and_a_template_is_for_the_policy_alone(place, reward, monkeypatch) -> None:
    kept, respond = [], scored_answers.respond
    monkeypatch.setattr(scored_answers, "respond", lambda actor, prompts, *rest: kept.append(rest[-1]) or respond(
        actor, prompts, *rest))
    found = evaluated(place, "judged", "plain=PLACE/one, asked=PLACE/copy",
                      "--evaluate.prompt_templates={asked: 'Score 1. {prompt}'}")
    assert found["reward_sources"] == "model"  # the reward run beside output_dir
    assert kept[0] is None and all(text.startswith("Score 1. say") for text in kept[1].texts)
    assert found["models"][0]["score"] != found["models"][1]["score"]
