"""vLLM's real scheduler and our scheduler half, over simulated memory, workers and daemon, in one thread."""
