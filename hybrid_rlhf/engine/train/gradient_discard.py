"""What a DeepSpeed engine has accumulated of a minibatch, forgotten: after a pass that failed half way.

DeepSpeed has no call for it. At ZeRO 1 to 3 gradients wait in buckets and in sums that only its own step clears, and
its hooks count how far the backward pass has come. These are its inner parts (0.19), and every stage is tested.
"""

from __future__ import annotations


def discard_gradients(engine, stage: int) -> None:  # noqa: ANN001 - a DeepSpeed engine
    """As if the passes since the last step had not been."""
    engine.zero_grad()
    if stage == 0:
        return
    optimizer = engine.optimizer
    optimizer.zero_grad()  # its second copy, in fp32, of bf16 gradients; at ZeRO 3 the next pass overwrites then
    if stage == 3:
        _empty_partitions(optimizer)
    else:
        _empty_buckets(optimizer)
    while optimizer._backward_active_depth:
        optimizer.exit_backward()
    optimizer._remaining_grad_acc_hooks = 0
    optimizer.clear_backward_seen_flag()


def _empty_buckets(optimizer) -> None:  # noqa: ANN001
    """At ZeRO 1 and 2."""
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
    optimizer.extra_large_param_to_reduce.clear()
    optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
    for sums in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        sums.update(dict.fromkeys(sums))
    optimizer._release_preflattened_grad_buffers()
    optimizer._release_ipg_buffers()
    optimizer.micro_step_id = -1


def _empty_partitions(optimizer) -> None:  # noqa: ANN001
    """At ZeRO 3: buckets, and the layers that were gathered when the pass failed."""
    optimizer.averaged_gradients = {}
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear_params()
    optimizer.params_already_reduced = dict.fromkeys(optimizer.params_already_reduced, False)
    optimizer.parameter_offload.partition_all_parameters()
