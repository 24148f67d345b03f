"""What `kvtier apply` says of the differences between files and pins."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

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
    shown = [f"{name} {_plain(before)} → {_plain(after)}" for name, (before, after) in fields.items()]
    return f" ({'; '.join(shown)})" if shown else ""


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return ",".join(f"{key}={each}" for key, each in sorted(value.items())) or "none"
    return json.dumps(value, ensure_ascii=False)


def _source_lines(client: Client, change: Change) -> Iterator[str]:
    assert change.declared is not None
    assert change.standing is not None
    before = client.get(change.standing.name).recipe
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


def to_jsonable(done: AppliedSet) -> dict[str, Any]:
    """Return the same for scripts."""
    changes = [
        {
            "name": change.name,
            "change": change.kind.value,
            "fields": {name: {"before": pair[0], "after": pair[1]} for name, pair in change.fields.items()},
        }
        for change in done.changes
        if change.kind is not ChangeKind.UNCHANGED
    ]
    num_unchanged = sum(change.kind is ChangeKind.UNCHANGED for change in done.changes)
    return {
        "changes": changes,
        "num_unchanged": num_unchanged,
        "unrendered": list(done.unrendered),
        "incomplete": list(done.incomplete),
        "not_in_files": list(done.not_in_files),
        "refused": [{"name": each.name, "why": each.why} for each in done.refused],
    }
