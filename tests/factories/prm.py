"""Tiny token-classification models that judge steps."""

from __future__ import annotations

import torch

from tests.factories.tiny import tiny_config, tiny_tokenizer


def save_prm(folder, seed: int = 1, labels: tuple[str, ...] = ("LABEL_0", "LABEL_1"), tokenizer=None, **changes):  # noqa: ANN001, ANN201
    """A process reward model at `folder`, its probabilities far from even, and the model itself."""
    from transformers import AutoModelForTokenClassification

    torch.manual_seed(seed)
    names = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
    model = AutoModelForTokenClassification.from_config(tiny_config(**names, **changes)).eval()
    for weight in (p for p in model.parameters() if p.dim() > 1):
        torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return model
