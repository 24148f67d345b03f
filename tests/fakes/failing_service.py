"""A running service whose system calls and ledger statements fail at the nth, once or from then on."""

import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

import kvtier.service.cache
from kvtier.disk.files.observed_ops import ObservedFileOps
from kvtier.ledger import Ledger
from kvtier.ledger.promise_copies import FOLDER_NAME, Promise, PromiseCopies
from kvtier.ledger.sql.database import Database
from kvtier.ledger.sql.schema import open_database
from kvtier.obs.counters import Counters
from kvtier.obs.histogram import Histogram
from kvtier.sealing import KeyRing
from tests.fakes.failing_ops import FailingOps


class SharedOps(FailingOps):
    """`FailingOps` for many threads: each call has a number of its own. Counts what was refused."""

    def __init__(self) -> None:
        super().__init__()
        self.num_refused = 0
        self._lock = threading.Lock()

    def _step(self, name: str) -> None:
        with self._lock:
            try:
                super()._step(name)
            except OSError:
                self.num_refused += 1
                raise

    def sql(self, statement: str) -> None:
        """Count a statement; a rollback always works."""
        if statement != "ROLLBACK":
            try:
                self._step(statement.split()[0].lower())
            except OSError as error:
                raise sqlite3.OperationalError(f"disk I/O error: {error}") from error


class ObservedSharedOps(ObservedFileOps, SharedOps):
    """The calls that fail, seen by the service's own observer, which each cache that is opened makes for itself."""

    def __init__(self) -> None:
        SharedOps.__init__(self)

    def observed_by(self, counters: Counters, fsync_s: Histogram) -> "ObservedSharedOps":
        """Count for this cache from now on."""
        ObservedFileOps.__init__(self, counters, fsync_s)
        return self


class CountedConnection:
    """A SQLite connection whose statements are calls of the same sequence as the file operations."""

    def __init__(self, connection: sqlite3.Connection, ops: SharedOps) -> None:
        self._connection, self._ops = connection, ops

    @property
    def text_factory(self) -> Any:
        """See sqlite3.Connection."""
        return self._connection.text_factory

    @text_factory.setter
    def text_factory(self, factory: Any) -> None:
        self._connection.text_factory = factory

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        """See sqlite3.Connection."""
        self._ops.sql(statement)
        return self._connection.execute(statement, *values)

    def executemany(self, statement: str, values: Any) -> sqlite3.Cursor:
        """See sqlite3.Connection."""
        self._ops.sql(statement)
        return self._connection.executemany(statement, values)

    def close(self) -> None:
        """See sqlite3.Connection."""
        self._connection.close()


class CountedCopies(PromiseCopies):
    """Copies of promises whose writing and removal are calls of the same sequence."""

    def __init__(self, folder: Path, ops: SharedOps, ring: KeyRing | None = None) -> None:
        super().__init__(folder, ring)
        self._ops = ops

    def put(self, row: Promise) -> None:
        """See PromiseCopies."""
        self._ops._step("put_copy")
        super().put(row)

    def drop(self, *copy_ids: str) -> None:
        """See PromiseCopies."""
        if copy_ids:
            self._ops._step("drop_copies")
        super().drop(*copy_ids)


class CountedLedger(Ledger):
    """A ledger over a `CountedConnection` and `CountedCopies`."""

    ops: SharedOps

    @classmethod
    def open(cls, path: Path, *, with_copies: bool = True, ring: KeyRing | None = None) -> "Ledger":
        """See Ledger."""
        copies = CountedCopies(path.parent / FOLDER_NAME, cls.ops, ring) if with_copies else None
        connection = CountedConnection(open_database(path), cls.ops)
        return cls(Database(path, connection, ring), copies)  # type: ignore[arg-type]


def failing_service(monkeypatch: pytest.MonkeyPatch) -> SharedOps:
    """Have every cache that is opened from now on use the operations that are returned; they work, for now."""
    ops = ObservedSharedOps()
    monkeypatch.setattr(CountedLedger, "ops", ops, raising=False)
    monkeypatch.setattr(kvtier.service.cache, "ObservedFileOps", ops.observed_by)
    monkeypatch.setattr(kvtier.service.cache, "Ledger", CountedLedger)
    return ops
