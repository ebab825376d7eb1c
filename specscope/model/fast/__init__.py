"""Faster ways on the CPU: products, whole layers and stacks of them, each proved equal before it is put in."""
