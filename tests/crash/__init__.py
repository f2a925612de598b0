"""Runs that are killed at any moment and started again."""
