"""The host tier: shared-memory arenas."""
