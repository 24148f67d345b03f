"""The ledger's tables, and opening the file that holds them."""

import os
import sqlite3
from contextlib import suppress
from pathlib import Path

from kvtier.errors import FormatVersionError, LedgerError
from kvtier.fsync import fsync_directory
from kvtier.ledger.sql.migrations import REMOVED_PACKS_TABLE, migrate

APPLICATION_ID = 0x4B565452
"""`KVTR`: says in the file's header whose database it is."""
SCHEMA_VERSION = 4
"""PRAGMA user_version. Version 1 had no row checksums, 2 no priorities, 3 no revisions and no removed packs; they are
brought up to date when opened."""
SIDE_FILES = ("-wal", "-shm")
"""What SQLite keeps beside a database."""
BUSY_TIMEOUT_S = 5.0
"""How long to wait for an operator who has the file open in the sqlite3 shell."""

_TABLES = f"""
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
    priority        INTEGER NOT NULL,   -- the higher, the more important
    revision        INTEGER NOT NULL    -- of the ledger when the row was written; its copy has the same
) STRICT;
CREATE TABLE bindings (
    pin_id          TEXT NOT NULL REFERENCES prompts (pin_id) ON DELETE CASCADE,
    namespace_id    TEXT NOT NULL REFERENCES namespaces (namespace_id) ON DELETE CASCADE,
    key_bytes       INTEGER NOT NULL,
    keys            BLOB NOT NULL,      -- keys of key_bytes each, one after the other
    covered_tokens  INTEGER NOT NULL,
    checksum        INTEGER NOT NULL,
    revision        INTEGER NOT NULL,
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
{REMOVED_PACKS_TABLE};
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
    checkpoint(connection)


def _check_integrity(connection: sqlite3.Connection, path: Path) -> None:
    # What is left of the WAL of a daemon that was killed may not fit the pages that stayed: look at the indexes too.
    was_killed = _is_filled(path.with_name(path.name + "-wal"))
    try:
        (verdict,) = connection.execute(f"PRAGMA {'integrity' if was_killed else 'quick'}_check(1)").fetchone()
    except UnicodeDecodeError as exc:  # the verdict quotes damaged text
        raise _damaged(path, str(exc)) from exc
    if verdict != "ok":
        raise _damaged(path, verdict)


def _is_filled(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def _create_tables(connection: sqlite3.Connection, path: Path) -> None:
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
        raise _foreign(path)
    # One transaction: a crash leaves an empty file or all tables.
    connection.executescript(
        f"BEGIN;{_TABLES}PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
    )


def checkpoint(connection: sqlite3.Connection) -> bool:
    """Move everything from the WAL into the database and empty the WAL; say whether that was possible.

    Between commits nothing is in the WAL then: SQLite cuts a damaged one off at the damage without an error, and with
    it what was acknowledged. A rollback journal costs as much, but lets who reads block who writes.
    """
    try:
        connection.execute("PRAGMA busy_timeout = 0")  # who reads is not waited for: the next commit tries again
        row = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        is_busy = row is None or bool(row[0])
    except sqlite3.Error:
        is_busy = True
    with suppress(sqlite3.Error):
        connection.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")
    return not is_busy


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    (value,) = connection.execute(f"PRAGMA {pragma}").fetchone()
    return int(value)


def _damaged(path: Path, problem: str) -> LedgerError:
    return LedgerError(
        f"the ledger {path} is damaged or not a kvtier ledger ({problem}); run `kvtier fsck --offline --repair`, which "
        "saves what can be read and brings back pins from their copies and chunks from their packs, or restore it from "
        "a backup"
    )


def _foreign(path: Path) -> LedgerError:
    return LedgerError(f"{path} is another program's SQLite database; give kvtier another disk.dir")
