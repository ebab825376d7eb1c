"""`specscope tune`: what other trees would have accepted, judged from the records of one run. No torch."""
