"""How TRL's PRMTrainer tokenised a row: an oracle for what a process reward model reads."""

from __future__ import annotations

from itertools import chain


def trl_row(features: dict, tokenizer, step_separator: str) -> dict:  # noqa: ANN001
    """input_ids and labels (-100: none) of {prompt, completions, labels}: PRMTrainer.tokenize_row of TRL 1.13.0
    (Apache License 2.0, the HuggingFace team), without truncation. Later releases of TRL have no PRMTrainer, so its
    lines stand here."""
    prompt_ids = tokenizer(features["prompt"], add_special_tokens=False)["input_ids"]
    completions_ids = [
        tokenizer(completion, add_special_tokens=False)["input_ids"] for completion in features["completions"]
    ]
    labels = [int(label) for label in features["labels"]]
    separator_ids = tokenizer.encode(step_separator, add_special_tokens=False)
    completions_ids = [completion + separator_ids for completion in completions_ids]
    labels = [
        [-100] * (len(completion) - 1) + [label] for completion, label in zip(completions_ids, labels, strict=True)
    ]
    completion_ids = list(chain(*completions_ids))
    labels = list(chain(*labels))
    if tokenizer.bos_token_id is not None:
        prompt_ids = [tokenizer.bos_token_id, *prompt_ids]
    return {"input_ids": prompt_ids + completion_ids, "labels": [-100] * len(prompt_ids) + labels}
