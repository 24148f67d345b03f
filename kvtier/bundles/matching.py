"""Which namespace here a bundle's KV is interchangeable with, or why there is none."""

from kvtier.bundles.bundle import Bundle
from kvtier.core.fingerprint import differing_fields
from kvtier.core.layout import KVLayout
from kvtier.errors import NamespaceMismatchError
from kvtier.service import Cache
from kvtier.tiering.namespace import Namespace

_SHOWN_CHARS = 40


def find_namespace(cache: Cache, bundle: Bundle) -> Namespace:
    """Return the namespace whose KV the bundle's is interchangeable with.

    Raises:
        NamespaceMismatchError: There is none; names the fields in which the nearest one differs.
    """
    known = [namespace for namespace in cache.namespaces.values() if not namespace.ephemeral]
    for namespace in known:
        if namespace.fingerprint == dict(bundle.fingerprint):
            if namespace.layout != bundle.layout:
                fields = ", ".join(_differing_layout(namespace.layout, bundle.layout))
                raise NamespaceMismatchError(
                    f"the bundle has another layout than namespace {namespace.namespace_id} here ({fields}); "
                    "the kvtier versions of the two machines differ: upgrade both, and export again"
                )
            return namespace
    if not known:
        raise NamespaceMismatchError(
            f"no engine has attached to this daemon yet, so no namespace can take the bundle; start vLLM with "
            f"{bundle.model} and the kvtier connector once, then import"
        )
    nearest = min(
        known,
        key=lambda other: (
            len(differing_fields(bundle.fingerprint, other.fingerprint)),
            other.row.model != bundle.model,
            other.namespace_id,
        ),
    )
    raise NamespaceMismatchError(
        f"the bundle's KV cannot be used here: it was made for {bundle.model}, and the nearest namespace here "
        f"({nearest.namespace_id[:12]}, {nearest.row.model}) differs in {_differences(bundle, nearest)}; start vLLM "
        "with the same model and settings once, then import"
    )


def _differences(bundle: Bundle, other: Namespace) -> str:
    fields = differing_fields(bundle.fingerprint, other.fingerprint)
    return ", ".join(
        f"{field} ({_shown(bundle.fingerprint.get(field))} in the bundle, {_shown(other.fingerprint.get(field))} here)"
        for field in fields
    )


def _shown(value: str | None) -> str:
    if value is None:
        return "absent"
    return value if len(value) <= _SHOWN_CHARS else value[: _SHOWN_CHARS - 1] + "…"


def _differing_layout(one: KVLayout, other: KVLayout) -> list[str]:
    return [name for name in KVLayout.__dataclass_fields__ if getattr(one, name) != getattr(other, name)]
