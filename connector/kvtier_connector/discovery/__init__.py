"""Finds prompts that repeat, in what requests begin with, and reports it to the daemon (ADR 22).

`chat_rendering.py`, `user_turn.py` and `template_dates.py` learn from the chat template where a system prompt ends.
"""
