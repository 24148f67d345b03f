"""A simulation of vLLM's admission: which order of waiting requests gives which times to first token."""
