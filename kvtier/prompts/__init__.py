"""Prompts that people pin: the commands on them, the book of all of them, and how far each is durable."""
