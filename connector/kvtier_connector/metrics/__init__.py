"""What the connector counts, and how vLLM is given it."""
