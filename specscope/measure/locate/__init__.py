"""Engines that made a capture, run again over the same tokens beside a reference."""
