"""The ledger's tables, and opening the file that holds them."""

import os
import sqlite3
from pathlib import Path

from kvtier.errors import FormatVersionError, LedgerError
from kvtier.fsync import fsync_directory
from kvtier.ledger.migrations import migrate

APPLICATION_ID = 0x4B565452
"""`KVTR`: says in the file's header whose database it is."""
SCHEMA_VERSION = 3
"""PRAGMA user_version. Version 1 had no row checksums, 2 no priorities; they are brought up to date when opened."""
BUSY_TIMEOUT_S = 5.0
"""How long to wait for an operator who has the file open in the sqlite3 shell."""

_TABLES = """
CREATE TABLE namespaces (
    namespace_id    TEXT PRIMARY KEY,
    model           TEXT NOT NULL,
    fingerprint     TEXT NOT NULL,      -- JSON object of strings
    layout          TEXT NOT NULL,      -- JSON of KVLayout
    created_unix_s  REAL NOT NULL,
    seen_unix_s     REAL NOT NULL,
    checksum        INTEGER NOT NULL    -- of the other columns, see `row_checksum`
) STRICT;
CREATE TABLE prompts (
    name            TEXT PRIMARY KEY,
    pin_id          TEXT NOT NULL UNIQUE,
    pinned          INTEGER NOT NULL,
    tokens          BLOB NOT NULL,      -- uint32, little endian
    model           TEXT NOT NULL,
    lora_name       TEXT NOT NULL,
    lora_path       TEXT NOT NULL,
    cache_salt      TEXT NOT NULL,
    recipe_json     TEXT NOT NULL,
    created_unix_s  REAL NOT NULL,
    expires_unix_s  REAL NOT NULL,      -- 0: never
    checksum        INTEGER NOT NULL,
    priority        INTEGER NOT NULL    -- the higher, the more important
) STRICT;
CREATE TABLE bindings (
    pin_id          TEXT NOT NULL REFERENCES prompts (pin_id) ON DELETE CASCADE,
    namespace_id    TEXT NOT NULL REFERENCES namespaces (namespace_id) ON DELETE CASCADE,
    key_bytes       INTEGER NOT NULL,
    keys            BLOB NOT NULL,      -- keys of key_bytes each, one after the other
    covered_tokens  INTEGER NOT NULL,
    checksum        INTEGER NOT NULL,
    PRIMARY KEY (pin_id, namespace_id)
) STRICT;
CREATE INDEX bindings_by_namespace ON bindings (namespace_id);
CREATE TABLE packs (
    pack_id         TEXT PRIMARY KEY,
    namespace_id    TEXT NOT NULL REFERENCES namespaces (namespace_id) ON DELETE CASCADE,
    file_bytes      INTEGER NOT NULL
) STRICT;
CREATE INDEX packs_by_namespace ON packs (namespace_id);
CREATE TABLE chunks (
    namespace_id    TEXT NOT NULL,
    key             BLOB NOT NULL,
    pack_id         TEXT NOT NULL REFERENCES packs (pack_id) ON DELETE CASCADE,
    offset          INTEGER NOT NULL,
    stored_bytes    INTEGER NOT NULL,
    raw_bytes       INTEGER NOT NULL,
    codec           TEXT NOT NULL,
    checksum        INTEGER NOT NULL,   -- xxh3_64, reinterpreted as signed
    PRIMARY KEY (namespace_id, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX chunks_by_pack ON chunks (pack_id);
"""


def open_database(path: Path) -> sqlite3.Connection:
    """Open the ledger's file, or create it (0600: it holds prompts), ready for durable transactions.

    Raises:
        FormatVersionError: A newer kvtier wrote it.
        LedgerError: It is damaged, or another program's database, or cannot be opened.
    """
    try:
        _create_private(path)
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as exc:
        raise LedgerError(f"cannot open the ledger {path}: {exc}; check the directory and its owner") from exc
    try:
        _prepare(connection, path)
    except sqlite3.DatabaseError as exc:
        connection.close()
        if isinstance(exc, sqlite3.OperationalError):  # locked, disk full, read only: the file itself may be fine
            raise LedgerError(f"cannot open the ledger {path}: {exc}; free space or stop who locks it") from exc
        raise _damaged(path, str(exc)) from exc
    except BaseException:
        connection.close()
        raise
    return connection


def _create_private(path: Path) -> None:
    if not path.exists():
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    _check_integrity(connection, path)
    version = _number(connection, "user_version")
    if version > SCHEMA_VERSION:  # before the journal mode is set, which is kept in the file
        raise FormatVersionError(path, version, SCHEMA_VERSION)
    # FULL: without it a WAL commit is not fsynced, and a power cut takes back acknowledged pins.
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")
    if version == 0:
        _create_tables(connection, path)
        fsync_directory(path.parent)
    elif _number(connection, "application_id") != APPLICATION_ID:
        raise _foreign(path)
    elif version < SCHEMA_VERSION:
        migrate(connection, version, SCHEMA_VERSION)


def _check_integrity(connection: sqlite3.Connection, path: Path) -> None:
    try:
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except UnicodeDecodeError as exc:  # the verdict quotes damaged text
        raise _damaged(path, str(exc)) from exc
    if verdict != "ok":
        raise _damaged(path, verdict)


def _create_tables(connection: sqlite3.Connection, path: Path) -> None:
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
        raise _foreign(path)
    # One transaction: a crash leaves an empty file or all tables.
    connection.executescript(
        f"BEGIN;{_TABLES}PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
    )


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    (value,) = connection.execute(f"PRAGMA {pragma}").fetchone()
    return int(value)


def _damaged(path: Path, problem: str) -> LedgerError:
    return LedgerError(
        f"the ledger {path} is damaged or not a kvtier ledger ({problem}); restore it from a backup, or move it away "
        "together with its -wal and -shm files and start again: pins are lost then, prompts must be pinned anew"
    )


def _foreign(path: Path) -> LedgerError:
    return LedgerError(f"{path} is another program's SQLite database; give kvtier another disk.dir")
