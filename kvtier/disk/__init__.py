"""The disk tier: which chunks are on disk and where (`chunk_index`), and the pack files that hold them (`packs/`)."""
