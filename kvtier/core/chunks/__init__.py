"""Chunks of one namespace: where each is held, who leases and pins it, which leaves a tier first, what is a hit."""
