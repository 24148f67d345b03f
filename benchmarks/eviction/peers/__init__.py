"""Other eviction policies, over blocks of equal size; a request uses its blocks from the tail to the head."""
