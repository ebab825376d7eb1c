"""Spans on their way to an OTLP endpoint: made readable for an exporter, queued, and sent while it answers."""
