"""What a step costs here, how often nodes are accepted, and from these how much to draft."""
