"""Finds prompts that repeat, in what requests begin with, and reports it to the daemon (ADR 22).

`PromptObserver` has the scheduler's side, which appends to `RequestQueue` (`observed_requests.py`), and a thread that
does the rest: `chat_rendering.py`, `user_turn.py` and `template_dates.py` learn at the start where a system prompt
ends; `system_prompts.py` finds that place in a request, `seen_prefixes.py` names its prefixes, and
`changing_middle.py` notices prompts that differ from one token on.
"""

from kvtier_connector.discovery.prompt_observer import PromptObserver

__all__ = ["PromptObserver"]
