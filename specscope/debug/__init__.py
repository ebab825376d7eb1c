"""Run, pause and step over anything that steps. Nothing here imports torch."""
