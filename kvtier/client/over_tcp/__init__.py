"""The way to a daemon on another host: its address, TLS, and the credentials that it asks for (docs/access.md)."""
