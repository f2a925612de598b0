"""Formulas: pure functions on tensors, fp32 inside, every mean masked. They import torch and nothing above it."""
