"""What requests ask of kvtier, and what became of them."""
