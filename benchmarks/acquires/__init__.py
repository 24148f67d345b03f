"""`python -m benchmarks.acquires`: acquires of many engines at once, through one daemon."""
