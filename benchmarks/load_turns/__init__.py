"""Load on systems that take turns: `python -m benchmarks.load_turns`."""
