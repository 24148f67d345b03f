"""Requests as engines report them, from short names of their prefixes."""

from kvtier.discovery.seen import SeenPrefix, SeenRequest


def digest(name: str) -> bytes:
    return name.encode().ljust(16, b".")


def request(*prefixes: tuple[str, int], prompt: int = 0, system: str = "", num_tokens: int = 40_000) -> SeenRequest:
    """Return a request with prefixes by name and tokens; `system` names the one that is the system prompt."""
    seen = [SeenPrefix(digest(name), length, name == system) for name, length in prefixes]
    return SeenRequest(seen, prompt, num_tokens)
