"""Using a trained model: chat at the terminal, a server. Never imports trainers, run or rollout.collect."""
