"""`python -m benchmarks.gpu`: times to first token and idle cost, measured on a GPU."""
