"""The `specscope` command, one file a verb. Each part is imported only when its verb runs."""
