"""Where chunks lie: the host tier (shared-memory arenas) and the disk tier (packs)."""
