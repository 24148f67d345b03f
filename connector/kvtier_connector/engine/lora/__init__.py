"""LoRA adapters by content: their digests, which are in every chunk key, and how these are known in time."""
