"""Namespaces: everything that makes KV bytes interchangeable, as named fields and one id."""

import hashlib
import json
from collections.abc import Mapping


def namespace_id(fields: Mapping[str, str]) -> str:
    """Return the id of the namespace with these fields: equal fields, equal id.

    Args:
        fields: Field name to canonical JSON value, as an engine states them in Hello.
    """
    canonical = json.dumps(dict(fields), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def differing_fields(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the names of fields in which two namespaces differ, sorted."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
