"""File operations below the packs: the seam where tests inject faults; scratch memory; a thread per pack."""
