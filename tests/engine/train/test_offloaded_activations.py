"""Activations that wait on the CPU come back as they were, and weights do not travel."""

import pytest
import torch

from hybrid_rlhf.engine.train.offload import saved_on_cpu
from tests.factories.tiny import tiny_causal_lm


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_bit_equal_and_the_weights_stay_where_they_are(checkpointing):
    model, ids = tiny_causal_lm().train(), torch.arange(4, 36).view(2, 16)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model(input_ids=ids).logits.logsumexp(-1).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with saved_on_cpu(model, min_bytes=0) as moved:
        loss = model(input_ids=ids).logits.logsumexp(-1).sum()
    loss.backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    states = 2 * 16 * 32 * 4  # one layer's input in bytes
    assert moved["bytes"] >= 2 * states
    if checkpointing:  # the inputs of two layers, and what lies outside them: final norm, head and loss
        assert moved["bytes"] < 8 * states + 2 * 2 * 16 * 300 * 4


def test_what_is_small_or_no_activation_stays():
    weight = torch.nn.Linear(64, 64)
    with saved_on_cpu(weight, min_bytes=10**6) as moved:
        weight(torch.randn(4, 64)).square().sum().backward()
    assert moved["bytes"] == 0
    with saved_on_cpu(weight, min_bytes=0) as moved:
        weight(torch.randn(4, 64, requires_grad=True)).sum().backward()  # saves the input and the weight
    assert moved["bytes"] == 4 * 64 * 4
