"""Chat with trained models at the terminal: python inference/chat --model DIR, or hybrid-rlhf chat --model DIR."""
