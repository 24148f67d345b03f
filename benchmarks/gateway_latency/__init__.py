"""What the gateway adds to requests: `python -m benchmarks.gateway_latency`."""
