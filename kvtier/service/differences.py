"""Why an engine finds nothing: other namespaces of its model hold chunks, and differ in some field."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.core.fingerprint import differing_fields
from kvtier.service.prompts import PromptBook

if TYPE_CHECKING:
    from kvtier.service.namespace import Namespace
    from kvtier.service.session import Session


@dataclass(frozen=True, kw_only=True)
class NamespaceDifference:
    """A namespace of the same model whose chunks an engine cannot use, and the fields that differ."""

    namespace_id: str
    fields: tuple[str, ...]
    num_prompts: int


def differing_namespaces(
    session: "Session", namespaces: Iterable["Namespace"], prompts: PromptBook
) -> list[NamespaceDifference]:
    """Explain an empty namespace: others of the same model that hold chunks, and what differs."""
    mine = session.namespace
    if _holds_chunks(mine):
        return []
    return [
        NamespaceDifference(
            namespace_id=other.namespace_id,
            fields=tuple(differing_fields(mine.fingerprint, other.fingerprint)),
            num_prompts=prompts.num_bound_in(other.namespace_id),
        )
        for other in namespaces
        if other is not mine and other.row.model in session.hello.model_names and _holds_chunks(other)
    ]


def _holds_chunks(namespace: "Namespace") -> bool:
    return namespace.table.num_host > 0 or namespace.table.disk.num_chunks > 0
