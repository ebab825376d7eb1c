"""The `specscope` command, one file per verb. Each part is imported only when its verb runs."""
