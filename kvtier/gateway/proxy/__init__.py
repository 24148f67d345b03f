"""`kvtier-gateway`: the same app in front of one or more vLLMs, as a reverse proxy."""
