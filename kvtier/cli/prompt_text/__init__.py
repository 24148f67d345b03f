"""The source of a prompt: read from files, kept as a recipe, and rendered to token ids by vLLM."""
