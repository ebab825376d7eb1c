"""The tiny trained models of tests/vllm/weights, made by what stands in this file at bd18674d.

As those of tests/faults, but of heads of 32: vLLM's attention on a CPU has no smaller ones.
"""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
TARGET, DRAFT, HEAD = WEIGHTS / "target", WEIGHTS / "draft", WEIGHTS / "head"
