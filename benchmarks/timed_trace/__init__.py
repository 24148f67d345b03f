"""A trace of requests against real servers: what each system hits, and how long requests wait."""
