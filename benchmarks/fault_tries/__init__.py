"""The tries of benchmarks/faults.py: attempt.py makes one, the other files list them by what they attack."""
