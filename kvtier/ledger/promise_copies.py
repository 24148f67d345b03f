"""A second copy of each promise: one small file for each prompt and each binding, apart from the ledger's database.

    <folder>/<id>-<revision>.json    id: 32 hex digits, from the row's key; revision: 16 hex digits

A promise must not share the fate of one file. A copy is written after the ledger's commit and before the caller gets
an answer, and it is removed before the row is. So a copy without a row, or with a newer revision than its row, means
that the ledger has lost what was acknowledged: `promises.py` puts it back. A row without a copy, or with an older one,
is what a crash between the two steps leaves: the copy is written again.

ADR 19 has what was rejected: a journal, prompts in each pack, a second database.
"""

import base64
import hashlib
import json
import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import xxhash

from kvtier.core.tokens import TokenIds
from kvtier.errors import InvalidArgumentError, KvtierError
from kvtier.fsync import TEMP_SUFFIX, fsync_directory, replace_file, write_files_beside
from kvtier.ledger.rows import (
    BindingRow,
    PromptRow,
    decode_keys,
    decode_labels,
    encode_keys,
    encode_labels,
    encode_tokens,
)
from kvtier.obs.log import log_event
from kvtier.sealing import KeyRing
from kvtier.sealing.aead import SealBrokenError
from kvtier.sealing.sealed_file import open_file, seal_file

logger = logging.getLogger(__name__)

FOLDER_NAME = "promises"
DAMAGED_SUFFIX = ".damaged"
_FORMAT = 1
_MIN_TOGETHER, _MAX_TOGETHER = 64, 4096
"""Copies that one sync of the file system makes durable; fewer than the least are synced one by one."""
_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{16})\.json")

_NONSENSE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidArgumentError)
"""What reading a file raises that holds something else than was written."""

Promise = PromptRow | BindingRow


class UnreadableCopyError(KvtierError):
    """A copy is there, and not known to be damaged: it stays as it is."""


def prompt_id(name: str) -> str:
    """Return the id under which a prompt's copy lies: that of its name, so a replaced prompt replaces its copy."""
    return _digest("prompt", name)


def binding_id(pin_id: str, namespace_id: str) -> str:
    """Return the id under which a binding's copy lies."""
    return _digest("binding", pin_id, namespace_id)


class PromiseCopies:
    """The folder of the copies. Blocks; used by the ledger's thread only.

    A copy proves itself by its checksum, and by its name, which is derived from what it says.

    Attributes:
        revisions: The revision of each copy, by id.
    """

    def __init__(self, folder: Path, ring: KeyRing | None = None) -> None:
        """Look at what is there, and change nothing; the folder is created with the first copy.

        `ring`: copies of prompts are sealed with it; those of bindings hold nothing secret.

        Raises:
            OSError: The operating system refused.
        """
        self.folder, self._ring = folder, ring
        self.revisions: dict[str, int] = {}
        self._older: list[tuple[str, int]] = []
        self._names_are_durable = True  # of all files
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if (match := _NAME.fullmatch(path.name)) is not None:
                copy_id, revision = match[1], int(match[2], 16)
                if copy_id in self.revisions:
                    self._older.append((copy_id, self.revisions[copy_id]))
                self.revisions[copy_id] = revision

    def tidy(self) -> None:
        """Remove what a crash left: half-written files, and older copies beside newer ones that are whole.

        Raises:
            OSError: The operating system refused.
        """
        for path in self.folder.glob(f"*{TEMP_SUFFIX}"):
            path.unlink(missing_ok=True)
        for copy_id, older in reversed(self._older):
            try:
                row = self.read(copy_id)
            except UnreadableCopyError:  # both stay
                continue
            if row is not None:
                self._path(copy_id, older).unlink(missing_ok=True)
            else:
                self.set_aside(copy_id)
                self.revisions[copy_id] = older
        self._older.clear()

    def put(self, row: Promise) -> None:
        """Write the copy of a row, durably, in place of an older one.

        Raises:
            OSError: The operating system refused; the older copy is there as before.
        """
        self.put_all([row])

    def put_all(self, rows: Sequence[Promise]) -> None:
        """Write the copies of rows; see `put`. Without rows: make those durable that were written before an error.

        Raises:
            OSError: The operating system refused; each copy is there as before, or the new one.
        """
        for start in range(0, len(rows), _MAX_TOGETHER):
            part = rows[start : start + _MAX_TOGETHER]
            if len(part) < _MIN_TOGETHER:
                for row in part:
                    self._names_are_durable = False
                    replace_file(self._path_of(row), self._encode(row))
                    self._written(row)
            else:
                beside = write_files_beside({self._path_of(row): self._encode(row) for row in part})
                self._names_are_durable = False
                for row in part:
                    path = self._path_of(row)
                    beside[path].rename(path)
                    self._written(row)
        if not self._names_are_durable:
            fsync_directory(self.folder)
            self._names_are_durable = True

    def _written(self, row: Promise) -> None:
        """Know a new copy at once: what is there must be known, to be removed with its row."""
        copy_id = copy_id_of(row)
        older = self.revisions.get(copy_id)
        self.revisions[copy_id] = row.revision
        if older is not None and older != row.revision:
            with suppress(OSError):  # the newer one counts
                self._path(copy_id, older).unlink(missing_ok=True)

    def drop(self, *copy_ids: str) -> None:
        """Remove copies, durably; unknown ids are fine.

        Raises:
            OSError: The operating system refused; some may be gone.
        """
        present = [copy_id for copy_id in copy_ids if copy_id in self.revisions]
        for copy_id in present:
            self._path(copy_id, self.revisions[copy_id]).unlink(missing_ok=True)
            del self.revisions[copy_id]
        if present:
            fsync_directory(self.folder)

    def read(self, copy_id: str) -> Promise | None:
        """Return the row that a copy holds, with its revision; None if it is not what was written.

        Raises:
            KeyMissingError: It is sealed with a key that the ring lacks.
            UnreadableCopyError: The operating system refused to read it, or a newer kvtier wrote it.
        """
        revision = self.revisions[copy_id]
        path = self._path(copy_id, revision)
        try:
            sealed = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise UnreadableCopyError(f"cannot read {path}: {exc.strerror or exc}") from exc
        try:
            text = _proven(open_file(self._ring, sealed, _associated(copy_id, revision), f"the copy {copy_id}"))
        except (SealBrokenError, *_NONSENSE):
            return None
        try:
            row = _decode(text)
        except _NONSENSE as exc:
            raise UnreadableCopyError(f"{path} is whole, and this kvtier cannot read it: upgrade kvtier") from exc
        return row if copy_id_of(row) == copy_id and row.revision == revision else None

    def set_aside(self, copy_id: str) -> None:
        """Give a damaged copy another name, for people to look at."""
        path = self._path(copy_id, self.revisions.pop(copy_id))
        with suppress(OSError):
            path.rename(path.with_name(path.name + DAMAGED_SUFFIX))
        log_event(logger, "promise_copy_damaged", level=logging.WARNING, path=path)

    def _encode(self, row: Promise) -> bytes:
        if not isinstance(row, PromptRow):
            return _encode(row)
        return seal_file(self._ring, _encode(row), _associated(copy_id_of(row), row.revision))

    def _path_of(self, row: Promise) -> Path:
        return self._path(copy_id_of(row), row.revision)

    def _path(self, copy_id: str, revision: int) -> Path:
        return self.folder / f"{copy_id}-{revision:016x}.json"


def copy_id_of(row: Promise) -> str:
    """Return the id under which the copy of a row lies."""
    return prompt_id(row.name) if isinstance(row, PromptRow) else binding_id(row.pin_id, row.namespace_id)


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _encode(row: Promise) -> bytes:
    fields = {"format": _FORMAT, "kind": "prompt" if isinstance(row, PromptRow) else "binding", **vars(row)}
    if isinstance(row, PromptRow):
        fields["tokens"] = base64.b64encode(encode_tokens(row.tokens)).decode()
        fields["labels"] = encode_labels(row.labels)
    else:
        fields["key_bytes"], keys = encode_keys(row.keys)
        fields["keys"] = base64.b64encode(keys).decode()
    text = json.dumps(fields)
    return json.dumps({"promise": text, "xxh3_64": _checksum(text)}).encode()


def _associated(copy_id: str, revision: int) -> bytes:
    return f"kvtier copy 1\0{copy_id}-{revision:016x}".encode()


def _checksum(text: str) -> str:
    return f"{xxhash.xxh3_64_intdigest(text.encode()):016x}"


def _proven(data: bytes) -> str:
    """Return what a copy says; raise one of `_NONSENSE` if that is not what was written."""
    outer = json.loads(data)
    text = outer["promise"]
    if _checksum(text) != outer["xxh3_64"]:
        raise ValueError("the checksum differs")
    return str(text)


def _decode(text: str) -> Promise:
    fields = json.loads(text)
    if fields.pop("format") != _FORMAT:
        raise ValueError("a newer kvtier wrote it")
    if fields.pop("kind") == "binding":
        keys = decode_keys(fields.pop("key_bytes"), base64.b64decode(fields.pop("keys")))
        return BindingRow(keys=keys, **fields)
    tokens, labels = (
        TokenIds.from_bytes(base64.b64decode(fields.pop("tokens"))),
        decode_labels(fields.pop("labels", "[]")),
    )
    return PromptRow(tokens=tokens, labels=labels, **fields)
