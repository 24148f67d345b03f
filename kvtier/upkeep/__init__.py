"""Care of the files while the daemon serves: compaction, scrub, adoption of orphan packs, the ledger's copies."""
