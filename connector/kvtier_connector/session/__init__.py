"""The session with the daemon, in threads of its own: the Hello, the pins it sends, its events."""
