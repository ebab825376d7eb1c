"""`python -m benchmarks faults`."""
