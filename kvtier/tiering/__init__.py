"""What moves chunks between the tiers of a namespace: write-back, promotion, prefetch, eviction for capacity."""
