"""Naming the cause: what a capture, its trial, its audit and its comparison say together."""
