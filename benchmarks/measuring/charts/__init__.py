"""How benchmarks draw: bars and lines, as PNG."""
