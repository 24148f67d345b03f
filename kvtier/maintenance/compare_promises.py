"""Prompts and bindings of the ledger against their copies: plain values in, findings out."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvtier.ledger import LedgerSnapshot
from kvtier.ledger.promise_copies import Promise, PromiseCopies, binding_id, prompt_id
from kvtier.ledger.rows import PromptRow
from kvtier.maintenance.findings import Code, Finding


@dataclass(frozen=True)
class Copy:
    """One copy: its revision, and the row that it holds, None if it is not what was written."""

    revision: int
    row: Promise | None


def read_copies(copies: PromiseCopies) -> dict[str, Copy]:
    """Return every copy, by id. Blocks; changes nothing."""
    return {copy_id: Copy(revision, copies.read(copy_id)) for copy_id, revision in copies.revisions.items()}


def compare_promises(ledger: LedgerSnapshot, copies: Mapping[str, Copy]) -> list[Finding]:
    """Return every disagreement; a finding's `subject` names the prompt, or else the copy's id."""
    rows = _rows_of(ledger)
    pins = {prompt.pin_id for prompt in ledger.prompts} | {
        copy.row.pin_id for copy in copies.values() if isinstance(copy.row, PromptRow)
    }
    namespaces = {row.namespace_id for row in ledger.namespaces}
    findings = []
    for copy_id, copy in sorted(copies.items()):
        subject, revision = rows.get(copy_id, ("", -1))
        if copy.row is None:
            what = "the copy is not what was written"
            findings.append(Finding(code=Code.COPY_DAMAGED, subject=copy_id, detail=f"{what}{_of(subject)}"))
        elif copy.revision > revision and copy.row.pin_id in pins:
            findings.append(_lost(copy_id, copy.row, namespaces, has_row=bool(subject)))
    for copy_id, (subject, revision) in sorted(rows.items()):
        copied = copies.get(copy_id)
        if copied is None or copied.revision < revision:
            what = ("it has no copy" if copied is None else "its copy is older") + "; the daemon writes it"
            findings.append(Finding(code=Code.NOTE_COPY_MISSING, subject=subject, detail=what))
    return findings


def _rows_of(ledger: LedgerSnapshot) -> dict[str, tuple[str, int]]:
    """Return what names each promise for people, and its revision, by the id of its copy."""
    names = {prompt.pin_id: prompt.name for prompt in ledger.prompts}
    rows = {prompt_id(prompt.name): (prompt.name, prompt.revision) for prompt in ledger.prompts}
    for binding in ledger.bindings:
        subject = f"binding of {names.get(binding.pin_id, binding.pin_id)}"
        rows[binding_id(binding.pin_id, binding.namespace_id)] = (subject, binding.revision)
    return rows


def _lost(copy_id: str, row: Promise, namespaces: Collection[str], *, has_row: bool) -> Finding:
    what = "the ledger has an older row" if has_row else "the ledger has no row of it"
    if isinstance(row, PromptRow):
        return Finding(code=Code.PROMISE_LOST, subject=row.name, detail=f"{what}, its copy is whole")
    if row.namespace_id not in namespaces:
        what = f"a binding in namespace {row.namespace_id}, which the ledger does not know; it waits for its engine"
        return Finding(code=Code.NOTE_UNCLAIMED, subject=copy_id, detail=what)
    return Finding(code=Code.PROMISE_LOST, subject=f"binding {copy_id}", detail=f"{what}, its copy is whole")


def _of(subject: str) -> str:
    return f", of {subject}" if subject else ""
