"""What the library returns: frozen dataclasses with the field names of the protocol, and their sums."""
