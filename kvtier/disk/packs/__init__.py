"""Pack files: their format, how they are written, read, listed and removed. `pack_tier` implements `DiskTier`."""
