"""Running out of memory on demand: in the forward pass of a layer, or in its backward pass."""

from __future__ import annotations

from contextlib import contextmanager

import torch


def out_of_memory():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class _FailingBackward(torch.autograd.Function):
    """The identity; its backward fails while `is_full(size)`, after the layers above have got their gradients."""

    @staticmethod
    def forward(ctx, states, is_full):
        ctx.is_full = is_full
        return states.view_as(states)

    @staticmethod
    def backward(ctx, grad):
        if ctx.is_full(grad.shape[0] * grad.shape[1]):
            raise out_of_memory()
        return grad, None


def failing(where, is_full):
    """A forward hook of a layer that fails `where` (forward or backward) if is_full(tokens of the micro-batch)."""

    def hook(_module, _inputs, output):
        states = output[0] if isinstance(output, tuple) else output
        if where == "forward" and is_full(states.shape[0] * states.shape[1]):
            raise out_of_memory()
        return _FailingBackward.apply(states, is_full) if where == "backward" and states.requires_grad else output

    return hook


@contextmanager
def little_memory(model, where, is_full):
    """The middle of `model` runs out of memory for a micro-batch of which is_full(tokens) is true."""
    handle = model.model.layers[0].register_forward_hook(failing(where, is_full))
    yield
    handle.remove()
