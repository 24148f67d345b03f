"""A real vllm serve, a real daemon, the real CLI."""
