"""The sample captures, as people name them on a command line."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "traces"
EAGLE, EVIDENCE, NGRAM, PLANTED, SAMPLED = (
    str(TRACES / f"{name}.jsonl") for name in ("eagle", "evidence", "ngram", "planted", "sampled")
)
