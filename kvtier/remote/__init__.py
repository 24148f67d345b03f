"""Stores that several hosts share: one contract (`base`) and its implementations."""
