"""JSON that is the same for equal values: a namespace is the digest of it."""

import json


def canonical(value: object) -> str:
    """Return JSON with sorted keys and no spaces; other types go in as text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)
