"""What every package stands on: settings and errors, tensors, metrics, processes. Imports nothing of ours."""
