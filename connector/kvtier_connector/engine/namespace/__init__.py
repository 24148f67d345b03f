"""What makes KV bytes interchangeable between engines."""
