"""What kvtier reads of this vLLM: versions, weights and KV layout; keys and places of its chunks follow from that."""
