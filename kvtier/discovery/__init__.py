"""Prompts found by themselves: what requests begin with is counted, and what is worth a pin is chosen."""
