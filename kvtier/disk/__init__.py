"""The disk tier: which chunks are on disk and where (`index`), the pack files that hold them, and their upkeep."""
