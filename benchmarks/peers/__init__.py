"""kvtier beside its peers: time to first token after a restart, and bytes on disk. Run `python -m benchmarks.peers`."""
