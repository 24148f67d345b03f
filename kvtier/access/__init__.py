"""Who may do what (ADR 38): callers and their roles, grants and tokens, rate limits, the audit log, the files of TLS.

`gatekeeper.py` puts them together; the gRPC server asks it, and so does the HTTP server before it calls. No I/O of
gRPC or HTTP is here.
"""
