"""`python -m benchmarks.serving_cost`: what it costs requests that kvtier is there."""
