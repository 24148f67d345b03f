"""Promotion: which chunks are read from disk next, in what batches, and which requests are notified of them."""
