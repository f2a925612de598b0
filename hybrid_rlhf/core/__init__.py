"""The base of every package: settings and errors, tensors, metrics, processes. Imports nothing of ours."""
