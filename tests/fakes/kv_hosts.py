"""Hosts of a fleet with real arenas, packs and ledgers: what an engine stored on one is restored on another."""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.core.layout import ChunkKey, GroupLayout, KVLayout, group_idx_of
from kvtier.core.slots import SlotState
from kvtier.core.stored import checksum_of
from kvtier.fleet.manifest import StoredKV
from kvtier.fleet.restoring import RestoreOutcome, RestoreResult, restore_prompt
from kvtier.fleet.uploading import upload_prompt
from kvtier.ledger import BindingRow, PromptRow
from kvtier.prompts.book import RequestedPin
from kvtier.remote.base import RemoteStore
from kvtier.service.cache import Cache
from kvtier.sessions.session import Session
from kvtier.tiering.namespace import Namespace
from tests.fakes.chunks import soft
from tests.fakes.memory_store import Bucket, MemoryStore
from tests.fakes.rig import ListPeer, check_disk, eventually, hello_of
from tests.fakes.scripted_engine import ONE_GROUP, chunk_key, config_in

TWO_RANKS = KVLayout(
    num_ranks=4,
    rank_bytes=4096,
    num_writers=2,
    groups=(
        GroupLayout(group_idx=0, chunk_tokens=16, useful_bytes=3000),
        GroupLayout(group_idx=1, chunk_tokens=32, useful_bytes=4096),
        GroupLayout(group_idx=2, chunk_tokens=16, useful_bytes=500, window_chunks=2),
    ),
)
"""Two writers of four ranks, two groups of full attention and one of a window."""


def keys_in(layout: KVLayout, name: str, num_tokens: int) -> list[ChunkKey]:
    """Return a prompt's keys as an engine binds them: groups one after the other, of windows the last chunks."""
    keys = list[ChunkKey]()
    for group in layout.groups:
        end = num_tokens // group.chunk_tokens
        first = max(0, end - group.window_chunks) if group.window_chunks else 0
        keys += [chunk_key((name, number), group.group_idx) for number in range(first, end)]
    return keys


def payload_of(layout: KVLayout, key: ChunkKey) -> bytes:
    """Return a chunk's payload: that of all writers."""
    return soft(layout.payload_bytes(group_idx_of(key)), seed=int.from_bytes(key[:8], "big"))


@dataclass
class Pinned:
    """A prompt of a host, in the namespace of its first engine."""

    prompt: PromptRow
    binding: BindingRow

    @property
    def keys(self) -> Sequence[ChunkKey]:
        """Its chunks."""
        return self.binding.keys


@dataclass
class KVHost:
    """A host with an engine that does what a test says."""

    cache: Cache
    session: Session
    peer: ListPeer
    namespace: Namespace
    store: MemoryStore
    layout: KVLayout
    num_others: int = field(default=0)

    async def pin(self, name: str = "p", num_tokens: int = 96, first: int = 0, **fields: Any) -> Pinned:
        """Pin a prompt and bind it."""
        requested = RequestedPin(name=name, tokens=range(first, first + num_tokens), **fields)
        (prompt,) = await self.cache.pins.apply([requested])
        covered_tokens = num_tokens // 32 * 32
        keys = keys_in(self.layout, f"{first}", covered_tokens)
        await self.cache.bindings.bind(self.session, prompt.pin_id, keys, covered_tokens, "")
        binding = self.cache.prompts.binding(prompt.pin_id, self.namespace.namespace_id)
        assert binding is not None
        return Pinned(prompt, binding)

    async def compute(self, keys: Iterable[ChunkKey], *, flush: bool = True) -> None:
        """Store chunks as an engine does; durable on return, or at least readable."""
        host, namespace = self.namespace.host, self.namespace
        for key in keys:
            (ref,) = await host.allocate(1)
            data, offset = payload_of(self.layout, key), 0
            for view in host.payload(ref, key):
                view[:] = data[offset : offset + view.nbytes]
                offset += view.nbytes
            assert host.seal(ref)
            namespace.table.host.commit_store(key, ref, checksum_of(host.payload(ref, key)))
            namespace.write_back.add([key])
            if flush and host.num_takable < 2:
                await namespace.write_back.flush()
        if flush:
            await namespace.write_back.flush()

    async def upload(self, name: str = "p") -> StoredKV:
        """Upload a durable prompt."""
        return await upload_prompt(self.cache, self.store, name, self.namespace.namespace_id, host="a")

    async def restore(
        self, pinned: Pinned, stored: StoredKV, *, store: RemoteStore | None = None, max_parallel: int = 3
    ) -> RestoreResult:
        """Restore a prompt."""
        return await restore_prompt(
            self.cache, store or self.store, self.namespace, pinned.binding, stored, max_parallel=max_parallel
        )

    def read(self, key: ChunkKey) -> bytes | None:
        """Return what this host has of a chunk, from memory or from disk."""
        chunk = self.namespace.table.get(key)
        if chunk is None or not chunk.held:
            return None
        if chunk.readable and chunk.slot is not None:
            return b"".join(self.namespace.host.payload(chunk.slot, key))
        assert chunk.location is not None
        data = bytearray(chunk.location.raw_bytes)
        self.cache.resources.disk.read_chunk(chunk.location, [memoryview(data)])
        return bytes(data)

    def held(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        """Return which of these chunks are here, all bytes of each compared."""
        found = [key for key in keys if self.namespace.table.holds(key)]
        for key in found:
            assert self.read(key) == payload_of(self.layout, key), key.hex()
        return found

    def is_durable(self, keys: Iterable[ChunkKey]) -> bool:
        """Say whether all are on disk."""
        chunks = self.namespace.table.get_all(keys)
        return all(chunk is not None and chunk.on_disk for chunk in chunks)

    async def join_and_check(self) -> None:
        """Wait for what runs by itself, then raise AssertionError unless every row, byte and chunk is accounted for."""
        for namespace in self.cache.namespaces.values():
            await namespace.write_back.flush()
        await eventually(lambda: not any(namespace.tasks.running for namespace in self.cache.namespaces.values()))
        for namespace in self.cache.namespaces.values():
            namespace.table.check()

        def is_conserved() -> bool:
            namespaces, is_right = self.cache.namespaces.values(), True
            for namespace in namespaces:
                counts, sessions = namespace.host.counts(), self.cache.sessions
                num_grants = sum(session.stores.num_grants for session in sessions if session.namespace is namespace)
                is_right &= counts[SlotState.GRANTED] == num_grants
                is_right &= counts[SlotState.SEALING] == counts[SlotState.LOADING] == counts[SlotState.BACKING] == 0
            held_bytes = sum(namespace.host.usage.held_bytes for namespace in namespaces)
            return is_right and self.cache.resources.budget.used_bytes == held_bytes

        await eventually(is_conserved)  # rows may be on their way to a session, or back
        if len(self.cache.namespaces) == 1:
            check_disk(self.namespace, self.cache.resources, self.cache.resources.disk)

    @property
    def scratch(self) -> list[Path]:
        """Scratch files."""
        return list((self.cache.config.disk.disk_dir / "tmp").glob("*"))


@asynccontextmanager
async def kv_host(
    folder: Path, bucket: Bucket, *, layout: KVLayout = ONE_GROUP, seed: int = 0, **settings: Any
) -> AsyncIterator[KVHost]:
    """Run a host with one engine."""
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240
    cache = await Cache.open(config_in(folder, **settings))
    try:
        peer = ListPeer()
        session = await cache.attach(hello_of("engine", layout), peer)
        namespace = cache.namespaces[session.namespace_id]
        yield KVHost(cache, session, peer, namespace, MemoryStore(bucket, seed=seed), layout)
    finally:
        await cache.close()


@asynccontextmanager
async def two_hosts(
    folder: Path, *, layout: KVLayout = ONE_GROUP, num_tokens: int = 96, **settings: Any
) -> AsyncIterator[tuple[KVHost, KVHost, Pinned, StoredKV]]:
    """Run one host whose prompt is in the store, and another that has pinned the same and has none of it.

    The settings are the second one's.
    """
    bucket = Bucket()
    async with (
        kv_host(folder / "a", bucket, layout=layout) as a,
        kv_host(folder / "b", bucket, layout=layout, **settings) as b,
    ):
        made = await a.pin(num_tokens=num_tokens)
        await a.compute(made.keys)
        stored = await a.upload()
        pinned = await b.pin(num_tokens=num_tokens)
        assert pinned.keys == made.keys
        yield a, b, pinned, stored
        for host in (a, b):
            await host.join_and_check()
            assert host.scratch == []


def is_restored(result: RestoreResult) -> bool:
    """Say whether everything came."""
    return result.outcome is RestoreOutcome.RESTORED
