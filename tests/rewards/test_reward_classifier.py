"""Classifiers of any architecture as sources, against plain transformers on the text."""

from __future__ import annotations

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.rewards.model import ClassifierSource
from tests.factories.rollouts import rollout
from tests.factories.tiny import tiny_tokenizer

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
