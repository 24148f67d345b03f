"""What an engine writes: slots that it was granted, stores on their way, and their sealing."""

import asyncio
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvtier.concurrency.turns import in_turns
from kvtier.core import limits
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef
from kvtier.errors import InvalidArgumentError
from kvtier.sessions.engine_peer import SessionBase
from kvtier.sessions.loads import Loads

StoreList = Sequence[tuple[ChunkKey, SlotRef]]
_MAX_GRANTED_AT_ONCE = 512
"""Slots: to make the pages of gigabytes takes seconds, and an engine begins to store with the first."""


class Stores:
    """Store credits of one session and what becomes of them. Loop thread only; never blocks.

    A slot is a credit until the engine says that it writes it, then written until all its ranks have reported, then
    sealed by a worker thread, which reads the stamps and the bytes.
    """

    def __init__(self, session: SessionBase, loads: Loads) -> None:
        self._session, self._tiers, self._loads = session, session.tiers, loads
        self._write_back = session.namespace.write_back
        self._credits: dict[int, SlotRef] = {}
        self._writing: dict[SlotRef, ChunkKey] = {}
        self._expected: set[ChunkKey] = set()  # of those being written: requests have asked to pin them
        self._topping_up = False
        self._num_sharing = sys.maxsize  # the fewest engines that it has shared the arena with
        self._seals: set[asyncio.Event] = set()  # of those that have not ended yet

    @property
    def num_grants(self) -> int:
        """Slots that the engine may write."""
        return len(self._credits) + len(self._writing)

    @property
    def is_writing(self) -> bool:
        """A store is under way; idle credits are none."""
        return bool(self._writing)

    def top_up(self) -> None:
        """Grant credits until the session has as many as it asked for, or no slot is to be had."""
        if not self._topping_up and not self._session.ended and self._num_short():
            self._topping_up = True
            self._session.start_task("credits", self._top_up())

    def _num_short(self) -> int:
        num_wanted = self._session.hello.store_credits - len(self._credits)
        if num_wanted <= 0:
            return 0
        # Idle credits are slots that hold nothing: an engine has a quarter of the arena at most, the n-th that comes to
        # store an n-th of that. It does not become less while others come: the engine would wait for what it once had.
        # What waits for a slow disk stays in memory: grant less then.
        self._num_sharing = min(self._num_sharing, max(1, self._session.resources.num_storing()))
        share = (4 * 8 if self._write_back.queue.is_behind else 4) * self._num_sharing
        most = max(1, self._tiers.host.usage.num_affordable // share)
        return max(0, min(num_wanted, most - len(self._credits)))

    async def _top_up(self) -> None:
        try:
            refs = await self._tiers.host.allocate(min(self._num_short(), _MAX_GRANTED_AT_ONCE))
        finally:
            self._topping_up = False
        if self._session.ended:
            for ref in refs:
                self._tiers.host.release(ref)
            self._session.namespace.top_up_all()
            return
        if refs:
            self._credits |= {ref.slot: ref for ref in refs}
            self._session.peer.credits_granted(refs)
        if len(refs) == _MAX_GRANTED_AT_ONCE:
            self.top_up()

    def begin(self, stores: StoreList, requested: Iterable[ChunkKey] = ()) -> None:
        """Credits are being written. What is `requested` is kept though no pin may have it yet: it is on its way.

        Raises:
            InvalidArgumentError: A slot was not granted to this session at that generation, or a key is of no group.
        """
        groups = set(self._tiers.layout.group_indexes())
        for key, _ in stores:
            limits.check_key("store_begin.key", key, groups)
        for key, ref in stores:
            if self._credits.get(ref.slot) != ref:
                raise InvalidArgumentError(
                    "store slot", f"{ref.slot}@{ref.generation}", "was not granted to this session"
                )
            del self._credits[ref.slot]
            self._writing[ref] = key
        self._expected.update(requested)
        self.top_up()

    def done(self, stores: StoreList) -> None:
        """All ranks reported; the stamps decide."""
        sealing: list[tuple[ChunkKey, SlotRef]] = []
        for key, ref in stores:
            if self._writing.get(ref) == key and self._tiers.host.seal(ref):
                del self._writing[ref]
                sealing.append((key, ref))
        if sealing:
            self._seals.add(ended := asyncio.Event())
            self._session.start_task("seal", self._seal(sealing, ended))

    def abort(self, stores: StoreList) -> None:
        """No rank touches these slots any longer, and they hold nothing."""
        for key, ref in stores:
            if self._writing.get(ref) == key:
                del self._writing[ref]
                self._expected.discard(key)
                self._tiers.host.release(ref)
                self._tiers.counters.stores_discarded_aborted += 1
        self._session.namespace.top_up_all()

    async def _seal(self, stores: StoreList, ended: asyncio.Event) -> None:
        tiers, began_s = self._tiers, time.monotonic()
        try:
            checksums = await self._session.resources.in_io(self._verify, stores)
            # The last of a prompt first: the head is to look the most recent.
            held = [key for key, ref in reversed(stores) if self._commit(key, ref, checksums.get(ref))]
        finally:
            self._seals.discard(ended)
            ended.set()
        held.reverse()
        self._session.resources.timings.seal.observe(time.monotonic() - began_s)
        self._write_back.add(held)
        tiers.inventory.announce(held, held=True)
        tiers.inventory.announce([key for key, _ in stores if not tiers.table.holds(key)], held=False)
        self._session.namespace.top_up_all()

    def _commit(self, key: ChunkKey, ref: SlotRef, checksum: int | None) -> bool:
        """Take a verified slot in, or free it; say whether the chunk is held now."""
        tiers, counters = self._tiers, self._tiers.counters
        is_wanted = self._session.resources.stores_all or key in self._expected or tiers.table.get(key) is not None
        self._expected.discard(key)
        if self._session.namespace.quarantine is not None:
            tiers.host.release(ref)
            counters.stores_discarded_quarantined += 1
            return tiers.table.holds(key)
        if checksum is None or not is_wanted:  # not stamped as granted, or no one wants it any longer
            tiers.host.release(ref)
            counters.stores_discarded_stamp += checksum is None
            return False
        if tiers.table.host.commit_store(key, ref, checksum):
            counters.stored_chunks += 1
            counters.stored_bytes += tiers.payload_bytes(key)
        # Thrown away in favour of a copy that was evicted and is leased still, or that may fail to be promoted.
        return tiers.table.holds(key)

    def _verify(self, stores: StoreList) -> Mapping[SlotRef, int]:
        """Worker thread: checksums of the slots whose stamps agree with the grant."""
        verify = self._tiers.host.verify
        return {ref: checksum for key, ref in stores if (checksum := verify(ref, key)) is not None}

    def touch(self, keys: Sequence[ChunkKey], *, stored: bool = False) -> Iterator[None]:
        """Chunks were hit in GPU memory; or, with `stored`, the last of them are on their way into host memory."""
        if stored and self._seals:
            self._session.start_task("touch", self._touch_after(list(self._seals), keys))
        else:
            yield from self._loads.touch(keys, hit=not stored)

    async def _touch_after(self, seals: Sequence[asyncio.Event], keys: Sequence[ChunkKey]) -> None:
        for ended in seals:
            await ended.wait()
        await in_turns(self._loads.touch(keys, hit=False))

    def quarantine(self) -> int:
        """The stream is gone: processes of the engine may still write these slots; return how many."""
        refs = [*self._credits.values(), *self._writing]
        for ref in refs:
            self._tiers.host.quarantine(ref)
        return len(refs)

    def release_all(self) -> None:
        """No process of the engine writes any longer."""
        for ref in [*self._credits.values(), *self._writing]:
            self._tiers.host.release(ref)
