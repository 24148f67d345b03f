"""The connector's metrics: their declaration, and their counts on the way to vLLM."""
