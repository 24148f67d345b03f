"""Pins that requests ask for."""
