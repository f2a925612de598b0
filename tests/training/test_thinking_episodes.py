"""Runs of several turns and a tool, under templates that leave out the thoughts of earlier turns: the texts between
the turns are written here by hand, and a scripted model goes on only after exactly these tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rlhf.cli import main
from tests.factories.scripted import conversation, scripted_causal_lm
from tests.factories.times_tool import SCHEMA, TIMES
from tests.factories.tiny import own_cache
from tests.factories.trl_templates import template_of, tokenizer_of

CODE = '''
class Game:
    def reset(self, **row):
        self.calls, self.asked = 0, 0

''' + TIMES + '''
    def step(self, messages):
        self.asked += 1
        return "Sure?", self.asked == 2, float("36" in messages[-1]["content"])


class Talk:
    def reset(self, **row):
        self.asked = 0

    def step(self, messages):
        self.asked += 1
        return "Sure?", self.asked == 3, float("36" in messages[-1]["content"])
'''
JSON = '<tool_call>\n{"name": "times", "arguments": {"a": 12, "b": 3}}\n</tool_call><|im_end|>'
XML = "<tool_call>\n<function=times>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\n3\n</parameter>\n</function>\n" \
      "</tool_call><|im_end|>"
TOLD = "\n<|im_start|>user\n<tool_response>\n36\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
SURE = "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
THOUGHT = "<think>\nEasy.\n</think>\n\n"
FINAL = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>"
# said, given, said, given, said behind the first prompt
TALKS = {
    "qwen3": [THOUGHT + JSON, TOLD, f"{THOUGHT}It is 36.<|im_end|>", SURE, f"{THOUGHT}Yes, 36.<|im_end|>"],
    "qwen3_6": ["Easy.\n</think>\n\n" + XML, f"{TOLD}<think>\n", "Easy.\n</think>\n\nIt is 36.<|im_end|>",
                f"{SURE}<think>\n", "Easy.\n</think>\n\nYes, 36.<|im_end|>"],
    "qwen3_5_nothink": [XML, f"{TOLD}<think>\n\n</think>\n\n", "It is 36.<|im_end|>", f"{SURE}<think>\n\n</think>\n\n",
                        "Yes, 36.<|im_end|>"],
    "glm4moe": ["\n<think>Easy.</think>\n<tool_call>times\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n<arg_key>b"
                "</arg_key>\n<arg_value>3</arg_value>\n</tool_call><|observation|>",
                "\n<tool_response>\n36\n</tool_response><|assistant|>", "\n<think>Easy.</think>\nIt is 36.<|user|>",
                "\nSure?<|assistant|>", "\n<think>Easy.</think>\nYes, 36.<|user|>"],
    "gptoss": ["<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant to=functions.times<|channel|>commentary "
               'json<|message|>{"a": 12, "b": 3}<|call|>',
               '<|start|>functions.times to=assistant<|channel|>commentary<|message|>"36"<|end|><|start|>assistant',
               f"{FINAL}It is 36.<|return|>", "<|start|>user<|message|>Sure?<|end|><|start|>assistant",
               f"{FINAL}Yes, 36.<|return|>"],
    "deepseek_r1_distill": ["Easy.\n</think>\n\nIt is 36.<｜end▁of▁sentence｜>",
                            "<｜User｜>Sure?<｜Assistant｜><think>\n",
                            "Easy.\n</think>\n\nI see 36.<｜end▁of▁sentence｜>",
                            "<｜User｜>Sure?<｜Assistant｜><think>\n", "Yes, 36.<｜end▁of▁sentence｜>"]}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in ("qwen3", "gptoss") else pytest.mark.slow) for name in TALKS])
def test_three_turns_train_and_keep_the_thoughts_that_the_template_would_drop(tmp_path, name, capsys, monkeypatch):
    own_cache(monkeypatch, tmp_path / "cache")
    tokenizer, has_tool = tokenizer_of(name), name != "deepseek_r1_distill"
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is 12 * 3?"}], tokenize=False,
                                           tools=[SCHEMA] if has_tool else None, add_generation_prompt=True)
    *begin, last = TALKS[name]
    talks = [conversation(tokenizer, prompt, *begin, said) for said in (last, last.replace("36", "40"))]
    model = scripted_causal_lm(talks, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "acts.py").write_text(CODE)
    rows = [{"prompt": [{"role": "user", "content": "What is 12 * 3?"}], "number": i} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = main(["--stage", "grpo", "--output_dir", f"{tmp_path}/run", "--data.sources", f"[{tmp_path}/rows.jsonl]",
                 "--data.max_prompt_length=2000", "--model.dtype=float32", "--ppo.sampling.max_new_tokens=400",
                 "--model.model_name_or_path", f"{tmp_path}/model", "--train.max_steps=2",
                 "--ppo.sampling.num_samples=8",
                 "--train.per_device_train_batch_size=2", "--engine.zero_stage=0", "--roles.actor.learning_rate=1e-4",
                 f"--environment.factory={tmp_path}/acts.py:{'Game' if has_tool else 'Talk'}"])
    shown = capsys.readouterr()
    assert code == 0, shown.err[-2000:]
    assert shown.err.count("history: the chat template rewrites earlier turns when messages of role user follow (") == 1
    first, *_ = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert first["episodes/turns"] == 3 and first.get("tools/call_frequency", 0) == has_tool
    assert first.get("tools/malformed_frequency", 0) == first["episodes/no_room_ratio"] == 0
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("model", "run/model"))
    assert any(not torch.equal(before[key], after[key]) for key in before)
    sample = json.loads((tmp_path / "run/samples.jsonl").read_text().splitlines()[0])
    added = [turn["added"] for turn in sample["replay"]["turns"]]
    assert [tokenizer.decode(ids) for ids in added if ids] == TALKS[name][1::2]
    saved = tmp_path / "run/model"
    assert (Path(saved) / "chat_template.jinja").read_text() == template_of(name)
