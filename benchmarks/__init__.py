"""What the developers measure: `python -m benchmarks NAME`. Not in the wheel."""
