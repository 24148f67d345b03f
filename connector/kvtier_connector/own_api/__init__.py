"""What the connector asks of vLLM's own API server: the warm start, and the renewal of pins that are not durable."""
