"""A prompt's source and its tokens: the recipe that the daemon keeps, and vLLM, which renders it."""
