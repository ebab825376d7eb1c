"""Verification: a pure function from trees, distributions and coins to verdicts."""
