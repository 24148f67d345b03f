"""Decisions in plain code: no I/O, no clock, no threads. Time comes in as an argument, plans go out as values."""
