"""The references that run models."""
