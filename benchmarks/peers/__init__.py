"""`python -m benchmarks.peers`: time to first token after a restart, and bytes on disk, beside the peers."""
