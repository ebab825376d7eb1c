"""A run as tables: steps, nodes and tried parents, and what follows from them. Every judge selects from these."""
