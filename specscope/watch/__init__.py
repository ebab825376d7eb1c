"""Engines that report less than their steps: counters, log lines and responses, as aggregate steps. No torch."""
