"""Figures of a run for Prometheus, OTLP and the log, derived from its records."""
