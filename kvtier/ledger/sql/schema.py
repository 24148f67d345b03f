"""The ledger's tables, and opening the file that holds them."""

import os
import sqlite3
from contextlib import suppress
from pathlib import Path

from kvtier.errors import FormatVersionError, LedgerError
from kvtier.fsync import fsync_directory
from kvtier.ledger.sql.row_checksums import CHECKED_TABLES, checked_rows, row_checksum

APPLICATION_ID = 0x4B565452
"""`KVTR`: says in the file's header whose database it is."""
SEALED_APPLICATION_ID = 0x4B565453
"""`KVTS`: and that nothing of its prompts is plain, in no free page either (`Database.is_free_of_plain`)."""
SCHEMA_VERSION = 8
"""PRAGMA user_version. Older ledgers are brought up to date when they are opened."""
FIRST_CHECKED_VERSION = 2
_ADDED_COLUMNS = [
    *((FIRST_CHECKED_VERSION, table, "checksum INTEGER NOT NULL DEFAULT 0") for table in CHECKED_TABLES),
    (3, "prompts", "priority INTEGER NOT NULL DEFAULT 0"),
    (4, "prompts", "revision INTEGER NOT NULL DEFAULT 0"),
    (4, "bindings", "revision INTEGER NOT NULL DEFAULT 0"),
    (5, "prompts", "origin TEXT NOT NULL DEFAULT 'named'"),
    (5, "prompts", "owner TEXT NOT NULL DEFAULT ''"),
    (5, "prompts", "public INTEGER NOT NULL DEFAULT 0"),
    (6, "prompts", "labels TEXT NOT NULL DEFAULT '[]'"),
    (6, "prompts", "ttl_s INTEGER NOT NULL DEFAULT 0"),
    (6, "prompts", "sliding INTEGER NOT NULL DEFAULT 0"),
    (8, "prompts", "sealed_by TEXT NOT NULL DEFAULT ''"),
    (8, "prompts", "secrets BLOB NOT NULL DEFAULT x''"),
]
"""Since which version which table has which column."""
SIDE_FILES = ("-wal", "-shm")
"""What SQLite keeps beside a database."""
BUSY_TIMEOUT_S = 5.0
"""How long to wait for an operator who has the file open in the sqlite3 shell."""

_REMOVED_PACKS_TABLE = """CREATE TABLE removed_packs (
    pack_id         TEXT PRIMARY KEY    -- its rows are gone on purpose; a crash may leave, or bring back, its file
) STRICT, WITHOUT ROWID;"""
"""Since version 4."""
_SHARED_PINS_TABLE = """CREATE TABLE shared_pins (
    store           TEXT NOT NULL,      -- URL of the store that hosts share
    key             TEXT NOT NULL,
    manifest        BLOB NOT NULL,      -- as it was when ledger and store agreed last; has a checksum of its own
    version         TEXT NOT NULL,      -- the store's word for that
    PRIMARY KEY (store, key)
) STRICT, WITHOUT ROWID;"""
"""Since version 7."""
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
    revision        INTEGER NOT NULL,   -- of the ledger when the row was written; its copy has the same
    origin          TEXT NOT NULL,      -- see PromptRow
    owner           TEXT NOT NULL,      -- empty: no one in particular
    public          INTEGER NOT NULL,
    labels          TEXT NOT NULL,      -- JSON list of [key, value], by key
    ttl_s           INTEGER NOT NULL,   -- as it was given last; 0: none
    sliding         INTEGER NOT NULL,   -- 1: it begins again at each use
    sealed_by       TEXT NOT NULL,      -- name of a key; then tokens, cache_salt and recipe_json are empty
    secrets         BLOB NOT NULL       -- and these are here, sealed; else empty
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
{_REMOVED_PACKS_TABLE}
{_SHARED_PINS_TABLE}
"""


def open_database(path: Path) -> sqlite3.Connection:
    """Open the ledger's file, or create it (0600: it holds prompts), ready for durable transactions.

    Raises:
        FormatVersionError: A newer kvtier wrote it.
        LedgerError: It is damaged, or another program's database, or cannot be opened.
    """
    try:
        if not path.exists():
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as exc:
        raise LedgerError(f"cannot open the ledger {path}: {exc}; check the directory and its owner") from exc
    try:
        _prepare(connection, path)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as exc:  # the latter: a row's text is no longer UTF-8
        connection.close()
        is_text = "Could not decode" in str(exc)
        # Locked, disk full, read only: the file itself may be fine.
        if isinstance(exc, sqlite3.OperationalError) and not is_text:
            raise LedgerError(f"cannot open the ledger {path}: {exc}; free space or stop who locks it") from exc
        raise _damaged(path, str(exc)) from exc
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    _check_integrity(connection, path)
    version = checked_version(connection, path)
    # FULL: without it a WAL commit is not fsynced, and a power cut takes back acknowledged pins.
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")
    update_schema(connection, version)
    if version == 0:
        fsync_directory(path.parent)
    checkpoint(connection)


def checked_version(connection: sqlite3.Connection, path: Path) -> int:
    """Return the version of a ledger, 0 for an empty database. Changes nothing.

    Raises:
        FormatVersionError: A newer kvtier wrote it.
        LedgerError: It is another program's.
    """
    version, application_id = (number_of(connection, pragma) for pragma in ("user_version", "application_id"))
    if version > SCHEMA_VERSION:
        raise FormatVersionError(path, version, SCHEMA_VERSION)
    is_empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    is_ours = is_empty if version == 0 else application_id in (APPLICATION_ID, SEALED_APPLICATION_ID)
    if not is_ours:
        raise LedgerError(f"{path} is another program's SQLite database; give kvtier another disk.dir")
    return version


def update_schema(connection: sqlite3.Connection, version: int) -> None:
    """Create the tables of an empty database, or bring an older ledger up to date.

    Everything is one transaction, so a crash leaves old or new. Columns are only added: a row keeps what it says, and
    its checksum covers the new column too. An altered row keeps its old checksum, which does not fit, and is refused as
    before.

    Raises:
        sqlite3.Error: Nothing was changed.
    """
    if version == 0:
        connection.executescript(
            f"BEGIN;{_TABLES}PRAGMA application_id = {APPLICATION_ID};PRAGMA user_version = {SCHEMA_VERSION};COMMIT;"
        )
    elif version < SCHEMA_VERSION:
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            for table in CHECKED_TABLES:
                _add_columns(connection, table, version)
            if version < 4:
                connection.execute(_REMOVED_PACKS_TABLE)
            if version < 7:
                connection.execute(_SHARED_PINS_TABLE)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _add_columns(connection: sqlite3.Connection, table: str, version: int) -> None:
    is_checked = version >= FIRST_CHECKED_VERSION
    altered = {row.rowid for row in checked_rows(connection, table) if not row.is_intact} if is_checked else set()
    for since, of_table, column in _ADDED_COLUMNS:
        if since > version and of_table == table:
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
    for row in list(checked_rows(connection, table)):
        if row.rowid not in altered:
            checksum = row_checksum(row.columns)
            connection.execute(f"UPDATE {table} SET checksum = ? WHERE rowid = ?", (checksum, row.rowid))


def _check_integrity(connection: sqlite3.Connection, path: Path) -> None:
    # What is left of the WAL of a daemon that was killed may not fit the pages that stayed: look at the indexes too.
    was_killed = False
    with suppress(OSError):
        was_killed = path.with_name(path.name + "-wal").stat().st_size > 0
    try:
        (verdict,) = connection.execute(f"PRAGMA {'integrity' if was_killed else 'quick'}_check(1)").fetchone()
    except UnicodeDecodeError as exc:  # the verdict quotes damaged text
        raise _damaged(path, str(exc)) from exc
    if verdict != "ok":
        raise _damaged(path, verdict)


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


def number_of(connection: sqlite3.Connection, pragma: str) -> int:
    """Return a number in the file's header; raises sqlite3.Error."""
    (value,) = connection.execute(f"PRAGMA {pragma}").fetchone()
    return int(value)


def _damaged(path: Path, problem: str) -> LedgerError:
    return LedgerError(
        f"the ledger {path} is damaged or not a kvtier ledger ({problem}); run `kvtier fsck --offline --repair`, which "
        "saves what can be read and brings back pins from their copies and chunks from their packs, or restore it from "
        "a backup"
    )
