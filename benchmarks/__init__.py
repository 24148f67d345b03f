"""Programs that run kvtier against a real vLLM: the demo, and what the end-to-end tests share with it."""
