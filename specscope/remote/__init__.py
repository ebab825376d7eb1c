"""Engines elsewhere: their spans are received, and read back as records. No torch."""
