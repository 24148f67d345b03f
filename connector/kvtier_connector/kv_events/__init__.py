"""Pinned prompts in host memory, announced to routers through vLLM's KV cache events."""
