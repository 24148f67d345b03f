"""This vLLM as kvtier sees it: its differences by version, weights, adapters, and the keys and layout of its chunks."""
