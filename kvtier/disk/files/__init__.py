"""File operations below the packs: the seam where tests inject faults, page cache, read-ahead, write-behind."""
