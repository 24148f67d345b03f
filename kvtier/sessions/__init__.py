"""Sessions of engines: what an engine may read and write, and what it is notified of."""
