"""`python -m benchmarks.detect`: whether prompts that repeat are found in traffic, and what their pins are worth."""
