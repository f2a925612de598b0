"""The page on SmolLM2: its task shares nothing between training and test, and its cells follow from its rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import smollm2_page
import smollm2_tasks
import smollm2_tools
from smollm2_settings import EXPERIMENTS

from hybrid_rlhf.data.added_turns import check_keeps_history
from hybrid_rlhf.environments.builtin.expressions import calculator
from hybrid_rlhf.models.tool_calls import check_tools
from hybrid_rlhf.training.registry import STAGES
from tests.factories.tiny import chatml_tokenizer

# tokenizer_config.json of HuggingFaceTB/SmolLM2-135M-Instruct
SMOLLM2 = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
           "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
           "trained by Hugging Face<|im_end|>\n' }}{% endif %}"
           "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
           "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def test_no_pair_of_terms_of_the_test_is_trained_on_in_either_order(tmp_path) -> None:
    folder = smollm2_tasks.sums(tmp_path)
    terms = {}
    for name in ("train", "test"):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        words = [row["prompt"][0]["content"].removesuffix("? Answer with a number.").split() for row in rows]
        terms[name] = {frozenset((int(w[2]), int(w[4]))) for w in words}
        assert all(int(w[2]) + int(w[4]) == int(row["answer"]) for w, row in zip(words, rows, strict=True))
        assert name == "train" or len(rows) >= 200
    assert not terms["train"] & terms["test"] and len(terms["train"] | terms["test"]) == 210


def measured(right: int, perplexity: float) -> dict:
    kind = {"right": right, "ended": 1.0, "empty": 0, "length": 9.0}
    return {"items": 200, "greedy": kind, "sampled": kind, "kl": 1.5, "perplexity": perplexity}


def test_a_row_says_accuracy_with_wilson_s_interval_and_how_much_worse_the_perplexity_is() -> None:
    row = {"row": "grpo", "seed": 0, "settings": [], "seconds": 480.0, "cpu_seconds": 700.0, "peak_gib": 5.0,
           "history": {"steps": 16, "entropy": [2.0, 0.5]}, "after": measured(170, 10.4)}
    cells = dict(zip(smollm2_page.COLUMNS, smollm2_page.cells(row, measured(74, 10.0)), strict=True))
    assert cells["greedy"] == "0.850 (0.79-0.89)"  # Wilson by hand: centre .8434, half width .0494
    assert cells["perplexity"] == "10.40 (+4.0%)" and cells["entropy"] == "2.00 to 0.50" and cells["KL"] == "1.50"
    found = {"start": measured(74, 10.0), "machine": "here", "rows": [row]}
    assert "rloo (seed 0)" in smollm2_page.page(found).split("Not run yet:")[1]


def test_rows_of_another_task_and_of_another_machine_are_told_apart() -> None:
    row = {"row": "grpo_gcd", "seed": 0, "settings": [], "seconds": 480.0, "cpu_seconds": 700.0, "peak_gib": 5.0,
           "history": {"steps": 16}, "before": measured(40, 10.0), "after": measured(170, 10.4), "machine": "there"}
    text = smollm2_page.page({"start": measured(74, 10.0), "machine": "here", "rows": [row]})
    assert "On another machine (there): grpo_gcd (seed 0)." in text
    assert "| grpo_gcd | 0 | 200 | 0.200 to 0.850 (0.79-0.89) | 0.200 to 0.850 (0.79-0.89) | 1.00 |" in text


def test_every_row_is_a_stage_that_there_is() -> None:
    assert all(e.stage in STAGES or e.stage == "trl" for e in EXPERIMENTS.values())


def test_the_template_with_tools_is_smollm2_s_own_without_them_and_keeps_history() -> None:
    tokenizer = chatml_tokenizer()
    user, said = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    talks = [[user], [user, said], [{"role": "system", "content": "Be kind."}, user, said, user]]
    tokenizer.chat_template = SMOLLM2
    own = [tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) for talk in talks]
    tokenizer.chat_template = (Path(smollm2_tools.HERE) / "smollm2_tools.jinja").read_text()
    assert own == [tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) for talk in talks]
    check_tools(tokenizer)
    check_keeps_history(tokenizer, "tool")
    check_keeps_history(tokenizer, "user", has_tools=True)


def test_no_expression_of_the_tool_task_is_in_two_of_its_files_and_the_calculator_gives_the_answers(tmp_path) -> None:
    smollm2_tools.write_task(tmp_path, [])
    files = {name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
             for name in ("talks", "train", "test")}
    asked = {name: {(*sorted(re.findall(r"\d+", row["prompt"][0]["content"])), row["answer"]) for row in files[name]}
             for name in ("train", "test")}
    assert len(asked["train"]) > 790 and len(asked["test"]) == 200  # one sum may be asked in either order
    talks = [row["messages"] for row in files["talks"]]
    calls = [talk for talk in talks if len(talk) == 4]
    taught = {(*sorted(re.findall(r"\d+", talk[0]["content"])), talk[2]["content"]) for talk in calls}
    assert not asked["train"] & asked["test"] and not taught & (asked["train"] | asked["test"])
    for _, call, answer, last in calls:
        expression = call["tool_calls"][0]["function"]["arguments"]["expression"]
        assert calculator(expression) == answer["content"] == last["content"].split()[-1].rstrip(".")
    assert 200 < len(calls) < 280 and all(int(talk[1]["content"][14:-1]) <= 18 for talk in talks if len(talk) == 2)
