"""`kvtier`, the command line: a client of the daemon (gRPC) and of vLLM (HTTP). `app` puts the commands together."""
