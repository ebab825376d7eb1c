"""The part of audit that runs models: it imports torch, and is imported when an audit runs."""
