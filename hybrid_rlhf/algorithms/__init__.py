"""Formulas: pure functions on tensors, in fp32, every mean masked. They import torch and core/tensors.py alone."""
