"""The tries of benchmarks/faults.py: attempt.py makes one, product.py runs a command, the others list what is tried."""
