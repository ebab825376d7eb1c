"""`specscope tune`: what other trees would have accepted, estimated from the records of one run. No torch."""
