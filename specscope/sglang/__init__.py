"""Inside SGLang: the plugin that records what its speculative workers draft and verify."""
