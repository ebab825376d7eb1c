"""What `specscope bench` measures."""
