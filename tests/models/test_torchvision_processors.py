"""Image-text models whose processors need torchvision: Llama 4, whose forward is around its head, and Mistral 3.

With a CPU build of torch the torchvision that fits it must be installed beside it: another one breaks transformers."""

from __future__ import annotations

from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch
from torch.testing import assert_close

from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.models.backbone import hidden_states, joining
from hybrid_rlhf.models.images import load_reader
from hybrid_rlhf.roles.policy_module import PolicyModule
from tests.factories.vision import ROWS, by_transformers, folder, image_text_model, rows_of

pytestmark = pytest.mark.skipif(find_spec("torchvision") is None,
                                reason="the processors of Llama 4 and Mistral 3 need torchvision, which is not here")
KINDS = ("llama4", "mistral_small_3_1")


def states_by_transformers(model, inputs) -> torch.Tensor:
    """(T, H) of one row. Llama 4's own forward in transformers 5.24 asks its text part for image_outputs, which that
    lacks: here it gets None."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    inputs = {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
    with patch.object(MoeCausalLMOutputWithPast, "image_outputs", None, create=True):
        return model(**inputs, use_cache=False, output_hidden_states=True).hidden_states[-1][0]


@pytest.mark.parametrize("kind", KINDS)
def test_states_and_gradients_are_those_of_transformers(kind):
    model, other, reader = image_text_model(kind), image_text_model(kind), load_reader(folder(kind))
    ids, images = rows_of(kind)
    mask = length_mask([len(row) for row in ids])
    ours, total = hidden_states(model, SequenceBatch(pad_right(ids, 0), mask, mask, images=images)), 0.0
    for i, ((text, _), row) in enumerate(zip(ROWS, images, strict=True)):
        inputs = by_transformers(reader, text, row)
        assert inputs["input_ids"][0].tolist() == ids[i]
        theirs = states_by_transformers(other, inputs)
        assert_close(ours[i, : len(theirs)], theirs, atol=2e-5, rtol=1e-4)
        total = total + theirs.sin().sum()
    total.backward()
    ours.sin().masked_fill(~mask[..., None], 0).sum().backward()
    for (name, mine), their in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (mine.grad is None) == (their.grad is None), name
        if their.grad is not None:
            assert_close(mine.grad, their.grad, atol=1e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
    assert all(p.grad is not None for n, p in joining(model).named_parameters() if "language_model" not in n
               and "class_embedding" not in n)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_logprobs_are_those_of_the_training_forward(kind):
    prompts, images = rows_of(kind)
    model = image_text_model(kind)
    engine = HybridEngine(PolicyModule(model), model, pad_id=0)
    with engine.inference():
        out = engine.generate(prompts, SamplingConfig(max_new_tokens=8, temperature=1.0), seed=3, images=images)
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, out.tokens, strict=True)]
    mask = length_mask([len(row) for row in rows])
    is_answer = mask & ~length_mask([len(prompt) for prompt in prompts], mask.shape[1])
    with torch.no_grad():
        truth = engine(SequenceBatch(pad_right(rows, 0), mask, is_answer, images=images)).logprobs
    assert_close(torch.cat([torch.tensor(row) for row in out.logprobs]), truth, atol=2e-4, rtol=1e-4)
    assert engine.describe()["path"] == "native"
