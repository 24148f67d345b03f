"""What `pin` and `warm` do, step by step: the daemon and vLLM are asked here, and options are already values."""
