"""What producers inside other engines share: how they get in, and a chain as evidence."""
