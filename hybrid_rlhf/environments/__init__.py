"""Environments and tools: a user's classes and functions, their calls and their answers."""
