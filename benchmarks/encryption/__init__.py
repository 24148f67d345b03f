"""Sealed packs beside plain ones."""
