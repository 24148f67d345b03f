"""What `kvtier apply` says of the differences between files and pins."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping

from kvtier.core.limits import SET_LABEL
from kvtier.core.ttl import duration_text
from kvtier.errors import PromptNotFoundError
from kvtier.library.client import Client
from kvtier.library.declared import AppliedSet, Change, ChangeKind, source_diff
from kvtier.library.rendering.recipe import Recipe
from kvtier.printable import MAX_LISTED

_MARKS = {ChangeKind.CREATE: "+", ChangeKind.REPLACE: "~", ChangeKind.UPDATE: "~", ChangeKind.UNPIN: "-"}


def lines(client: Client, done: AppliedSet, *, dry_run: bool) -> Iterator[str]:
    """Yield a line for each prompt that differs, of a dry run the lines of its text too, and the sum."""
    changes = [change for change in done.changes if change.kind is not ChangeKind.UNCHANGED]
    for number, change in enumerate(changes):
        yield f"{_MARKS[change.kind]} {change.name}: {change.kind}{_fields(change.fields)}"
        if dry_run and change.kind is ChangeKind.REPLACE and number < MAX_LISTED:
            yield from (f"    {line}" for line in _source_lines(client, change))
    yield _sum(done, dry_run=dry_run)


def _fields(fields: Mapping[str, tuple[object, object]]) -> str:
    shown = [
        f"{name} {before} → {after}"
        for field, pair in fields.items()
        for (name, before), (_, after) in zip(*(_shown(field, value) for value in pair), strict=True)
        if before != after
    ]
    return f" ({'; '.join(shown)})" if shown else ""


def _shown(field: str, value: object) -> list[tuple[str, str]]:
    """Return a field as files write it, by its name there: of labels, the set apart."""
    if isinstance(value, Mapping):
        labels = ",".join(f"{key}={each}" for key, each in sorted(value.items()) if key != SET_LABEL)
        return [("labels", labels or "none"), ("set", value.get(SET_LABEL, "none"))]
    if field == "ttl_s" and isinstance(value, int):
        return [("ttl", duration_text(value))]
    return [(field, json.dumps(value, ensure_ascii=False))]


def _source_lines(client: Client, change: Change) -> Iterator[str]:
    assert change.declared is not None
    assert change.standing is not None
    try:
        before = client.get(change.standing.name).recipe
    except PromptNotFoundError:  # renamed or gone since it was compared; that it differs stays so
        return
    yield from source_diff(change.name, Recipe.from_values(before) if before else None, change.declared.recipe)


def _sum(done: AppliedSet, *, dry_run: bool) -> str:
    counts = Counter(change.kind for change in done.changes)
    words = {
        ChangeKind.CREATE: "new",
        ChangeKind.REPLACE: "replaced",
        ChangeKind.UPDATE: "changed",
        ChangeKind.UNPIN: "unpinned",
        ChangeKind.UNCHANGED: "unchanged",
    }
    parts = [f"{counts[kind]} {word}" for kind, word in words.items() if counts[kind]]
    return f"{'would be' if dry_run else 'applied'}: {', '.join(parts) or 'no prompts'}"
