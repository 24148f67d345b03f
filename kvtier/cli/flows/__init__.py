"""The steps of `kvtier pin` and `kvtier warm`: requests to the daemon and to vLLM, and the waits between them."""
