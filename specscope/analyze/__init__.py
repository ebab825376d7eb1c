"""Reports over captures. Nothing here imports torch."""
