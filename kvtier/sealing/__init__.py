"""Encryption at rest (ADR 40): keys from a file; chunks, values, streams and scratch files sealed with them."""

from kvtier.sealing.key_file import load_key_ring
from kvtier.sealing.key_ring import Key, KeyRing

__all__ = ["Key", "KeyRing", "load_key_ring"]
