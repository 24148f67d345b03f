"""Why an engine finds nothing: other namespaces of its model hold chunks, and differ in some field."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kvtier.core.fingerprint import differing_fields
from kvtier.tiering.namespace import Namespace


@dataclass(frozen=True, kw_only=True)
class NamespaceDifference:
    """A namespace of the same model whose chunks an engine cannot use, and the fields that differ."""

    namespace_id: str
    fields: tuple[str, ...]
    num_prompts: int


def differing_namespaces(
    mine: Namespace,
    model_names: Collection[str],
    namespaces: Iterable[Namespace],
    num_bound_in: Callable[[str], int],
) -> list[NamespaceDifference]:
    """Explain an empty namespace: others of the same model that hold chunks, and what differs.

    Args:
        mine: The namespace of the engine that attaches.
        model_names: What the engine calls its model.
        namespaces: All of them.
        num_bound_in: Returns how many prompts a namespace has keys for.
    """
    if _holds_chunks(mine):
        return []
    return [
        NamespaceDifference(
            namespace_id=other.namespace_id,
            fields=tuple(differing_fields(mine.fingerprint, other.fingerprint)),
            num_prompts=num_bound_in(other.namespace_id),
        )
        for other in namespaces
        if other is not mine and other.row.model in model_names and _holds_chunks(other)
    ]


def _holds_chunks(namespace: Namespace) -> bool:
    return namespace.table.host.num_chunks > 0 or namespace.table.disk.num_chunks > 0
