"""Care of files and memory while the daemon serves: compaction, scrub, orphan packs and rows, preallocation, copies."""
