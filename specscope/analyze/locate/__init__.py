"""Where a run breaks: the first operation whose inputs agree with a reference and whose output does not."""
