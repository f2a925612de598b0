"""Models that read text as sources: classifiers, and reward models of another family, on text and whole episodes."""

from __future__ import annotations

import json

import pytest
import torch

from hybrid_rlhf.cli import main
from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.data import chat
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.rewards import text_of
from hybrid_rlhf.rewards.model import ClassifierSource, ModelSource, read_by
from hybrid_rlhf.roles import Reward
from hybrid_rlhf.rollout import Prompts, Rollout
from tests.factories.rollouts import rollout
from tests.factories.stage_options import COMMON, PPO, WORDS, used
from tests.factories.tiny import chatml_tokenizer, save_tiny, tiny_scalar_model, tiny_tokenizer
from tests.factories.trl_templates import tokenizer_of

PROMPTS = ["say cat ", "say ", "the moon "]
KINDS = {"distilbert": dict(dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=64),
         "bert": dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                      max_position_embeddings=64),
         "roberta": dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                         max_position_embeddings=34, pad_token_id=1),
         "gpt2": dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)}


def saved(folder, kind: str, labels: list[str], **settings):
    """A classifier at `folder`, its head not near zero, and the model itself."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, id2label=dict(enumerate(labels)), label2id={n: i for i, n in enumerate(labels)},
                                  **{"vocab_size": 300, "pad_token_id": 0, **KINDS[kind], **settings})
    model = AutoModelForSequenceClassification.from_config(config).eval()
    for weight in (p for p in model.parameters() if p.dim() > 1):
        torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


@torch.no_grad()
@pytest.mark.parametrize("kind, labels, options", [
    ("distilbert", ["bad", "good"], {"label": "good"}),
    ("distilbert", ["bad", "so-so", "good"], {"label": 0, "reads": "completion"}),
    ("bert", ["score"], {"reads": "pair"}),
    ("gpt2", ["bad", "good"], {"label": "good"}),
])
def test_scores_are_the_model_s_own_on_its_own_tokens(tmp_path, kind, labels, options):
    model, tokenizer = saved(tmp_path / "judge", kind, labels), tiny_tokenizer()
    source = ClassifierSource(str(tmp_path / "judge"), "judge", batch_size=2, dtype="float32", **options)
    source.open()
    answers = ("red", "a small blue cat", "sun")
    scores = torch.tensor(source.score(rollout(answers, prompt=PROMPTS)))
    for i, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        texts = {"pair": (prompt, answer), "completion": (answer,)}.get(options.get("reads"), (prompt + answer,))
        ids = tokenizer(*texts).input_ids + ([3] if kind == "gpt2" else [])  # a decoder reads the end marker
        logits = model(torch.tensor([ids])).logits[0]
        probabilities = logits.softmax(0)
        chosen = {"good": len(labels) - 1, 0: 0}.get(options.get("label"))
        wanted = logits[0] if chosen is None else (probabilities[chosen] / (1 - probabilities[chosen])).log()
        assert scores[i] == pytest.approx(wanted.item(), abs=2e-4)
    assert scores.std() > 0.01


def test_a_label_that_is_missing_or_unknown_and_what_is_no_classifier_are_refused_before_weights_are_read(tmp_path):
    saved(tmp_path / "judge", "distilbert", ["bad", "good"])
    path = str(tmp_path / "judge")
    with pytest.raises(UserError, match=r"has the labels bad, good; give reward.options.judge \{label: good\}"):
        ClassifierSource(path, "judge")
    with pytest.raises(UserError, match=r"no label goood \(did you mean good"):
        ClassifierSource(path, "judge", label="goood")
    with pytest.raises(UserError, match="choose text, pair, completion"):
        ClassifierSource(path, "judge", label="good", reads="both")
    source = ClassifierSource(path, "judge", label="good")
    source.open()
    with pytest.raises(UserError, match=r"reward source judge: a response of .* it has 64 positions"):
        source.score(rollout(("cat " * 80, "a", "b"), prompt=PROMPTS))


@torch.no_grad()
def test_independent_labels_give_their_own_log_odds_whatever_the_others_say(tmp_path):
    """toxic-bert and its like: p is a sigmoid, so log p / (1 - p) is the logit."""
    model = saved(tmp_path / "judge", "distilbert", ["toxic", "rude"], problem_type="multi_label_classification")
    source = ClassifierSource(str(tmp_path / "judge"), "judge", label="toxic", dtype="float32", reads="completion")
    source.open()
    scores = source.score(rollout(["red", "a small blue cat"], prompt=PROMPTS[:2]))
    for answer, score in zip(["red", "a small blue cat"], scores, strict=True):
        logits = model(torch.tensor([tiny_tokenizer()(answer).input_ids])).logits[0]
        assert score == pytest.approx(logits[0].sigmoid().logit().item(), abs=2e-4)


def test_a_model_whose_positions_begin_after_the_padding_has_fewer_than_it_says(tmp_path):
    """RoBERTa: 34 positions, padding 1, so 32 tokens. A 33rd would be an index out of range."""
    saved(tmp_path / "judge", "roberta", ["score"])
    source = ClassifierSource(str(tmp_path / "judge"), "judge", reads="completion")
    source.open()
    texts = {len(tiny_tokenizer()(text).input_ids): text for text in ("a" * n for n in range(1, 80))}
    assert len(source.score(rollout([texts[32]], prompt=PROMPTS[:1]))) == 1
    with pytest.raises(UserError, match="a response of 33 of its tokens, and it has 32 positions"):
        source.score(rollout([texts[33]], prompt=PROMPTS[:1]))


# -- A reward model of another family with another tokenizer reads the responses as text -------------------------------


GPT2 = dict(kind="gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=256)


def bracket_tokenizer():
    tokenizer = tiny_tokenizer(280)
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}<|im_end|>{% endfor %}" \
                              "{% if add_generation_prompt %}[assistant] {% endif %}"
    return tokenizer


@pytest.mark.parametrize("prompt", ["say cat 1 ", [{"role": "user", "content": "say cat 1"}]])
def test_text_is_read_as_stage_2_reads_it_and_an_unfinished_answer_has_no_end(prompt):
    tokenizer = bracket_tokenizer()
    whole = read_by(tokenizer, prompt, "a small dog", is_ended=True, raw=True)
    assert whole == chat.encode(tokenizer, prompt, "a small dog").ids
    cut = read_by(tokenizer, prompt, "a small dog", is_ended=False, raw=True)
    before = prompt if isinstance(prompt, str) else "[user] say cat 1<|im_end|>[assistant] "
    assert tokenizer.decode(cut) == before + "a small dog"
    assert tokenizer.decode(whole) == before + "a small dog<|im_end|>"


@torch.no_grad()
def test_scores_are_those_of_plain_transformers_on_the_text():
    tokenizer, model = bracket_tokenizer(), tiny_scalar_model(vocab_size=280, **GPT2)
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
    tokenizer = bracket_tokenizer()
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


# -- Reward models that read text get the whole episode, as their own template writes it -------------------------------


ASKED = [{"role": "user", "content": "How warm is it?"}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
SAID = [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "name": "weather", "content": "7"},
        {"role": "assistant", "content": "It is cold."}]


def test_an_episode_is_read_as_the_template_writes_it():
    tokenizer = tokenizer_of("qwen2_5")
    whole = tokenizer.apply_chat_template([*ASKED, *SAID], tokenize=False).removesuffix("\n")
    assert read_by(tokenizer, ASKED, SAID, True) == tokenizer(whole, add_special_tokens=False)["input_ids"]
    cut = whole.removesuffix("<|im_end|>")
    assert read_by(tokenizer, ASKED, SAID, False) == tokenizer(cut, add_special_tokens=False)["input_ids"]


def test_a_template_that_cannot_show_calls_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"a reward model cannot read a response: .*leaves out tool calls; give one"):
        read_by(chatml_tokenizer(), ASKED, SAID, True)


def test_functions_of_ours_read_what_the_model_said_last():
    assert text_of(SAID) == "It is cold." and text_of([*SAID, {"role": "user", "content": "Bye."}]) == "It is cold."
    assert text_of("plain") == "plain"
