"""Forward hooks that are left out within a block, and those that are added there."""

from torch import nn

from hybrid_rlhf.core.torch_compat import hooks_kept


def test_a_hook_that_is_added_within_the_block_stays_behind_it():
    module, called = nn.Linear(2, 2), []
    module.register_forward_hook(lambda *_: called.append("before"))
    with hooks_kept(module, lambda hook: False):
        module.register_forward_hook(lambda *_: called.append("within"))
        removed = module.register_forward_hook(lambda *_: called.append("removed"))
        removed.remove()
        module(module.weight)
    assert called == ["within"]
    module(module.weight)
    assert called == ["within", "before", "within"]
