"""`python -m benchmarks.event_loop`: how long each call keeps the daemon's event loop busy."""
