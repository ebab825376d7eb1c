"""Programs of other people, run with specscope inside them."""
