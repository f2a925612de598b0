"""Training mode: micro-batches, ZeRO, optimizers, offload."""
