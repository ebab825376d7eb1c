"""Tree plans, heads on disk, digests of models, and files of costs. No torch; nothing of trace."""
