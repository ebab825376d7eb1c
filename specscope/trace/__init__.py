"""What happened: trees, records, spans, captures, figures. Nothing here imports torch."""
