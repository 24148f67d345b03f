"""HTTP in the daemon, in a thread with an event loop of its own: metrics, probes, and the API (ADR 37).

`transport/` serves, and ends clients that are too slow; `http_app` puts the paths together. The API
(`api/`) is a client of the daemon's own socket, as the command line is. Only metrics, probes and `number_history` take
a reading from the daemon's loop.
"""
