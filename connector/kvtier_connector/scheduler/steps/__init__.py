"""What a step of vLLM waits for, and which requests of it are looked at."""
