"""A running service whose system calls and ledger statements fail at the nth, once or from then on."""

import sqlite3
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvtier.service.cache
from kvtier.ledger import Ledger
from kvtier.ledger.schema import open_database
from kvtier.tiers.packs import PackTier
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


class CountedLedger(Ledger):
    """A ledger over a `CountedConnection`."""

    ops: SharedOps

    @classmethod
    def open(cls, path: Path) -> "Ledger":
        """See Ledger."""
        return cls(path, CountedConnection(open_database(path), cls.ops))  # type: ignore[arg-type]


def failing_service(monkeypatch: pytest.MonkeyPatch) -> SharedOps:
    """Have every cache that is opened from now on use the operations that are returned; they work, for now."""
    ops = SharedOps()
    monkeypatch.setattr(CountedLedger, "ops", ops, raising=False)
    monkeypatch.setattr(kvtier.service.cache, "PackTier", partial(PackTier, ops=ops))
    monkeypatch.setattr(kvtier.service.cache, "Ledger", CountedLedger)
    return ops
