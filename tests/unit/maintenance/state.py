"""A state directory with real packs and a real ledger, to be damaged."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from kvtier.core.fingerprint import namespace_id
from kvtier.core.layout import ChunkKey
from kvtier.core.stored import PackRecord
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.ledger import BindingRow, Ledger, LedgerSnapshot, NamespaceRow, PromptRow
from kvtier.ledger.namespace_files import save_namespace
from tests.fakes.chunks import key_of, layout_of, payload_of, read_back, soft

FINGERPRINT = {"weights": '"1"'}
NAMESPACE = namespace_id(FINGERPRINT)
LAYOUT = layout_of(num_ranks=1, useful_bytes=4000)
RAW_BYTES = 4000


class State:
    """`packs` of three chunks each, numbered through; a prompt pins them all."""

    def __init__(self, folder: Path, num_packs: int = 2) -> None:
        self.folder = folder
        self.tier = PackTier(folder / "packs")
        row = NamespaceRow(
            namespace_id=NAMESPACE,
            model="m",
            fingerprint=FINGERPRINT,
            layout=LAYOUT,
            created_unix_s=1.0,
            seen_unix_s=1.0,
        )
        self.data: dict[ChunkKey, bytes] = {}
        self.packs: list[PackRecord] = []
        ledger = Ledger.open(self.ledger_path)
        ledger.put_namespace(row)
        save_namespace(folder, row)
        for number in range(num_packs):
            self.packs.append(self.write_pack(3 * number))
            ledger.packs.commit_pack(self.packs[-1])
        self.prompt = PromptRow(
            name="p",
            pin_id="1" * 32,
            pinned=True,
            tokens=tuple(range(48 * num_packs)),
            model="",
            lora_name="",
            lora_path="",
            cache_salt="",
            recipe_json="",
            created_unix_s=1.0,
            expires_unix_s=0.0,
            priority=7,
        )
        ledger.promises.put_prompt(self.prompt)
        keys = tuple(self.data)
        ledger.promises.put_binding(
            BindingRow(pin_id="1" * 32, namespace_id=NAMESPACE, keys=keys, covered_tokens=48 * num_packs)
        )
        # One of a pack that is to be removed, too: no table is empty, so damage to any page is damage.
        ledger.packs.commit_pack(replace(self.packs[0], pack_id="0" * 32, chunks=()))
        ledger.close()

    @property
    def ledger_path(self) -> Path:
        return self.folder / "ledger.sqlite"

    def write_pack(self, first: int, namespace: str = NAMESPACE) -> PackRecord:
        """Write three chunks as a pack, without a row."""
        payloads = [payload_of(number, soft(RAW_BYTES, number)) for number in range(first, first + 3)]
        self.data |= {payload.key: bytes(payload.segments[0]) for payload in payloads}
        return self.tier.write_pack(namespace, payloads)

    def path(self, record: PackRecord) -> Path:
        return self.tier.directory / f"{record.pack_id}.kvpack"

    def flip(self, record: PackRecord, offset: int) -> None:
        """Flip one bit of a pack."""
        data = bytearray(self.path(record).read_bytes())
        data[offset] ^= 4
        self.path(record).write_bytes(data)

    def sql(self, *statements: str) -> None:
        """Edit the ledger as somebody with the sqlite3 shell."""
        with closing(sqlite3.connect(self.ledger_path)) as connection, connection:
            for statement in statements:
                connection.execute(statement)

    def put_prompts(self, names: Iterable[str]) -> None:
        """Add prompts."""
        ledger = Ledger.open(self.ledger_path)
        with ledger.together():
            for name in names:
                ledger.promises.put_prompt(replace(self.prompt, name=name, pin_id=name))
        ledger.close()

    def load(self) -> LedgerSnapshot:
        ledger = Ledger.open(self.ledger_path)
        try:
            return ledger.load()
        finally:
            ledger.close()

    def readable(self) -> set[ChunkKey]:
        """Chunks that the ledger names and that read as they were written."""
        found = set()
        for record in self.load().packs.values():
            for chunk in record.chunks:
                assert read_back(self.tier, chunk) == self.data[chunk.key]
                found.add(chunk.key)
        return found


def keys(*numbers: int) -> set[ChunkKey]:
    """Return made-up keys."""
    return {key_of(number) for number in numbers}
