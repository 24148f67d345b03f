"""What GPU pins do with vLLM's blocks in each step, and what the worst step of a large pool costs."""
