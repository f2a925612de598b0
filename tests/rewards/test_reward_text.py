"""A reward model of another family with another tokenizer reads the responses as text."""

import json

import pytest
import torch

from hybrid_rlhf.cli import main
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data import chat
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.rewards.model import ModelSource, read_by
from hybrid_rlhf.roles import Reward
from hybrid_rlhf.rollout import Prompts, Rollout
from tests.factories.stage_options import COMMON, PPO, WORDS, used
from tests.factories.tiny import save_tiny, tiny_scalar_model, tiny_tokenizer

GPT2 = dict(kind="gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=256)


def other_tokenizer():
    tokenizer = tiny_tokenizer(280)
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}<|im_end|>{% endfor %}" \
                              "{% if add_generation_prompt %}[assistant] {% endif %}"
    return tokenizer


@pytest.mark.parametrize("prompt", ["say cat 1 ", [{"role": "user", "content": "say cat 1"}]])
def test_text_is_read_as_stage_2_reads_it_and_an_unfinished_answer_has_no_end(prompt):
    tokenizer = other_tokenizer()
    whole = read_by(tokenizer, prompt, "a small dog", is_ended=True, raw=True)
    assert whole == chat.encode(tokenizer, prompt, "a small dog").ids
    cut = read_by(tokenizer, prompt, "a small dog", is_ended=False, raw=True)
    before = prompt if isinstance(prompt, str) else "[user] say cat 1<|im_end|>[assistant] "
    assert tokenizer.decode(cut) == before + "a small dog"
    assert tokenizer.decode(whole) == before + "a small dog<|im_end|>"


@torch.no_grad()
def test_scores_are_those_of_plain_transformers_on_the_text():
    tokenizer, model = other_tokenizer(), tiny_scalar_model(vocab_size=280, **GPT2)
    model.config.pad_token_id = 0
    prompts = Prompts([[5, 6], [7, 8, 9]], ["say cat ", "say dog "], {"prompt": ["say cat ", "say dog "]})
    rollout = Rollout.from_responses(prompts, [[10, 11, 3], [12]], [True, False], 0, ["the moon", "fox"])
    source = ModelSource(Reward(HybridEngine(ScalarModel(model), pad_id=0)), tokenizer=tokenizer, raw=True)
    scores = source.score(rollout)
    for i, (text, end) in enumerate((("say cat the moon", [3]), ("say dog fox", []))):
        ids = torch.tensor([tokenizer(text).input_ids + end])
        assert scores[i] == pytest.approx(model(ids).logits.item(), abs=1e-5)
    prompts.columns["prompt"][0] = "cat " * 300
    with pytest.raises(UserError, match="256 positions"):
        source.score(rollout)


def test_ppo_of_a_llama_actor_against_a_gpt2_reward_with_its_own_tokenizer(tmp_path, capfd):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"say {w}"}) + "\n" for w in WORDS))
    tokenizer = other_tokenizer()
    model = tiny_scalar_model(vocab_size=280, **GPT2)
    model.config.pad_token_id = 0
    model.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    argv = ["--stage", "ppo", "--output_dir", f"{tmp_path}/ppo", *used("ppo", COMMON), *PPO,
            f"--data.cache_dir={tmp_path}/cache", f"--data.sources=[{{path: {tmp_path}/rows.jsonl}}]",
            "--model.lora.r", "4", "--model.model_name_or_path", save_tiny(tmp_path / "base"),
            "--roles.reward.model_name_or_path", f"{tmp_path}/judge"]
    assert main(argv) == 0
    said = capfd.readouterr().err
    assert "reads the responses as text" in said and "sharing: actor with ref with critic" in said
    rows = [json.loads(line) for line in (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert all(v is not None for row in rows for v in row.values()) and rows[0]["rewards/model/std"] > 0
    argv[2:4] = ["--output_dir", f"{tmp_path}/refused"]
    assert main([*argv, "--roles.critic.model_name_or_path", f"{tmp_path}/judge"]) == 2
    assert "do not fit together" in capfd.readouterr().err
