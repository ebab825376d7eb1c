"""Spans as trace stores and collectors give them back, made lines of OTLP JSON."""
