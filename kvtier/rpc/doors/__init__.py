"""Who calls, at the unix socket and at the TCP port: the check of each call, TLS, and what an owner sees (ADR 38)."""
