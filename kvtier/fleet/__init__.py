"""A fleet: daemons that share the pins of operators, and their KV, through a store (ADR 33)."""
