"""Inference mode: continuous batching over slots of a KV cache, kernels, tensor parallelism."""
