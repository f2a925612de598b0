"""Trained models behind OpenAI's API: python inference/server --model DIR, or hybrid-rlhf serve --model DIR."""
