"""What an apply did, as plain JSON values: for `kvtier apply --json`, and over HTTP."""

from collections.abc import Iterable
from typing import Any

from kvtier.errors import KvtierError
from kvtier.library.declared.applied import AppliedSet
from kvtier.library.declared.difference import ChangeKind
from kvtier.library.declared.documents import DeclaredError


def mistakes_to_jsonable(errors: Iterable[DeclaredError]) -> dict[str, Any]:
    """Return why nothing was applied, with the keys of what was."""
    said = [
        {"file": each.source, "line": each.line, "column": each.column, "field": each.field, "message": str(each)}
        for each in errors
    ]
    return applied_to_jsonable(AppliedSet(changes=[])) | {"errors": said}


def failure_to_jsonable(error: KvtierError) -> dict[str, Any]:
    """Return what stopped an apply that is no mistake of a file, with the keys of what was applied."""
    said = {"file": "", "line": 0, "column": 0, "field": "", "message": str(error)}
    return applied_to_jsonable(AppliedSet(changes=[])) | {"errors": [said]}


def applied_to_jsonable(done: AppliedSet) -> dict[str, Any]:
    """Return what an apply did, as plain JSON values."""
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
        "errors": [],
        "not_in_files": list(done.not_in_files),
        "refused": [{"name": each.name, "why": each.why} for each in done.refused],
    }
