"""Predicts how much memory a run needs before it starts, and finds settings that fit a card."""
