"""gRPC over the service: messages to values and back, errors to statuses, streams to sessions."""
