"""HTTP on the wire: uvicorn in a thread of its own, connections that end when a client is too slow, bounds, TLS."""
