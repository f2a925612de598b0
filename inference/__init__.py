"""Doors for a trained model: chat at the terminal. Never imports trainers, run or collect."""
