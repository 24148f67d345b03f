"""`python -m benchmarks.fleet`: a prompt's KV to a store that hosts share, and down from it."""
