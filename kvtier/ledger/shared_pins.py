"""What a fleet's store said of each pin when ledger and store agreed last: the base of the next merge (ADR 33).

It is in the ledger's database, so that it shares the fate of the pins: an old backup brings back an old base too. The
rows prove themselves (a manifest has a checksum), and losing them loses nothing: the store has them.
"""

import hashlib
import sqlite3
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvtier.ledger.sql.database import Database

SENT = "#sent"
PINS = "pins/"
"""What the keys of manifests begin with."""


_STORE = "store = (SELECT store FROM shared_pins LIMIT 1)"  # `load` leaves rows of one store only
_NOTE = f"UPDATE shared_pins SET version = '' WHERE {_STORE} AND key = ?"
_NOTE_SENT = (
    f"INSERT OR IGNORE INTO shared_pins SELECT store, ?, manifest, '' FROM shared_pins WHERE {_STORE} AND key = ?"
)
_ENDED_BY_TTL = "SELECT 1 FROM prompts WHERE name = ? AND pinned = 0 AND expires_unix_s > 0"


def manifest_key(name: str) -> str:
    """Return the key of a name's manifest."""
    return f"{PINS}{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"


def note_gone(sql: sqlite3.Connection, names: Iterable[str]) -> None:
    """In a transaction, before it deletes these prompts' rows: their pins end, and a start must not take them for lost.

    What was sent counts as the base of a pin that has none. A row that its TTL has unpinned ends nothing as it goes.
    """
    for name in names:
        if sql.execute(_ENDED_BY_TTL, (name,)).fetchone() is None:
            key = manifest_key(name)
            sql.execute(_NOTE, (key,))
            sql.execute(_NOTE_SENT, (key, key + SENT))


_PUT = """INSERT INTO shared_pins (store, key, manifest, version) VALUES (?1, ?2, ?3, ?4)
ON CONFLICT (store, key) DO UPDATE SET manifest = ?3, version = CASE
    WHEN shared_pins.version = '' AND ?5 <> '' AND NOT EXISTS (SELECT 1 FROM prompts WHERE name = ?5) THEN ''
    ELSE ?4 END"""


class SharedPinRow(NamedTuple):
    """One name of the fleet, as the store had it, or as this host has sent it.

    Attributes:
        key: Of the manifest's object; with `SENT` behind it: of what was sent, and may not be there.
        manifest: Its bytes; of what was sent, each on a line.
        version: The store's word for this content; empty for what was sent, and for a pin that has ended here without
            leaving a row, which the store does not know yet.
        pinned_name: Its name, if the manifest says that it is pinned. Then the note that it has ended here stays as
            long as there is no prompt of that name. To `put` only.
    """

    key: str
    manifest: bytes
    version: str
    pinned_name: str = ""


class SharedPins:
    """The bases of one store. Every method is one transaction, and raises LedgerError if SQLite refuses."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def load(self, store: str) -> Sequence[SharedPinRow]:
        """Return the bases of a store, and forget those of any other: what they say is not true of this one."""
        with self._database.transaction() as sql:
            sql.execute("DELETE FROM shared_pins WHERE store <> ?", (store,))
            rows = sql.execute("SELECT key, manifest, version FROM shared_pins")
            return [SharedPinRow(*row) for row in rows.fetchall()]

    def put(self, store: str, rows: Iterable[SharedPinRow]) -> None:
        """Insert or replace bases."""
        with self._database.transaction() as sql:
            sql.executemany(_PUT, ((store, *row) for row in rows))
