"""A head in training beside the same head in serving: `specscope audit --trainer FOLDER`."""
