"""One HTML file of a run, or of two compared, for any browser: `specscope export run.jsonl -o run.html`."""
