"""Which namespace is evicted from disk: one that no engine used for a day before any other, then the lowest value."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.disk.disk_usage import DiskUsage
from kvtier.errors import LedgerError
from kvtier.tiering.capacity import STALE_S, Capacity

NOW_S = 1_000_000.0
CHUNK_BYTES = 10


@dataclass
class FakeNamespace:
    """As much of a namespace as `Capacity` asks for; every chunk has a pack of its own."""

    namespace_id: str
    usage: DiskUsage
    value: float
    num_chunks: int = 4
    live: bool = False
    seen_unix_s: float = NOW_S
    error: Exception | None = None
    dropped: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number in range(self.num_chunks):
            self.usage.add(f"{self.namespace_id}-{number}", CHUNK_BYTES)

    @property
    def row(self) -> Any:
        return SimpleNamespace(seen_unix_s=self.seen_unix_s)

    @property
    def table(self) -> Any:
        num_bytes = self.num_chunks * CHUNK_BYTES
        disk = SimpleNamespace(num_unpinned=self.num_chunks, lowest_value=self.value, num_bytes=num_bytes)
        return SimpleNamespace(disk=disk)

    @property
    def index(self) -> "FakeNamespace":
        return self

    async def drop_cheapest(self, num_bytes: int) -> int:
        if self.error is not None:
            raise self.error
        count = min(self.num_chunks, -(-num_bytes // CHUNK_BYTES))
        for _ in range(count):
            self.num_chunks -= 1
            self.usage.remove(f"{self.namespace_id}-{self.num_chunks}")
        self.dropped.append(count)
        return count * CHUNK_BYTES


def capacity_of(usage: DiskUsage, *namespaces: FakeNamespace) -> Capacity:
    disk = SimpleNamespace(disk_bytes=usage.limit_bytes, high_watermark=0.9, low_watermark=0.5)
    stores: Any = SimpleNamespace(disk_usage=usage, config=SimpleNamespace(disk=disk))
    by_id: Any = {namespace.namespace_id: namespace for namespace in namespaces}
    return Capacity(stores, by_id, now_unix_s=lambda: NOW_S)


def test_a_stale_namespace_is_evicted_before_a_cheaper_one() -> None:
    usage = DiskUsage(limit_bytes=80)
    stale = FakeNamespace("stale", usage, value=9.0, seen_unix_s=NOW_S - STALE_S - 1)
    cheap = FakeNamespace("cheap", usage, value=1.0, seen_unix_s=NOW_S - STALE_S + 1)
    asyncio.run(capacity_of(usage, cheap, stale).find_disk_capacity(50))
    assert (stale.num_chunks, cheap.num_chunks) == (0, 3)
    assert usage.fits(50)


def test_an_engine_that_has_been_attached_for_long_is_not_stale() -> None:
    usage = DiskUsage(limit_bytes=80)
    old = FakeNamespace("old", usage, value=9.0, live=True, seen_unix_s=NOW_S - 2 * STALE_S)
    cheap = FakeNamespace("cheap", usage, value=1.0)
    asyncio.run(capacity_of(usage, old, cheap).find_disk_capacity(20))
    assert (old.num_chunks, cheap.num_chunks) == (4, 2)


@dataclass(eq=False)
class LargeNamespace(FakeNamespace):
    """It holds more than is ever dropped at once."""

    asked: list[int] = field(default_factory=list)

    async def drop_cheapest(self, num_bytes: int) -> int:
        self.asked.append(num_bytes)
        return num_bytes


def test_much_is_dropped_in_steps_of_256_mib() -> None:
    """Values change as chunks go: another namespace may be the next."""
    mib = 1024**2
    only = LargeNamespace("only", DiskUsage(limit_bytes=80), value=1.0)
    capacity = capacity_of(only.usage, only)
    asyncio.run(capacity.drop_until_enough(lambda: 600 * mib - sum(only.asked)))
    assert only.asked == [256 * mib, 256 * mib, 88 * mib]


@dataclass(eq=False)
class HoleyNamespace(FakeNamespace):
    """Its chunks can be dropped as whole packs only; its first drop ends another namespace and frees nothing."""

    ended: dict[str, Any] = field(default_factory=dict)
    freed_bytes: int = 0
    num_not_unlinked = 0

    @property
    def packs(self) -> Any:
        packs: Any = type("Packs", (list,), {"live_bytes": lambda self, pack_id: 1})
        return packs([f"{self.namespace_id}-0"])

    async def drop_cheapest(self, num_bytes: int) -> int:
        return 0

    async def drop_packs(self, pack_ids: list[str], *, unpinned_only: bool) -> int:
        self.ended.clear()
        self.dropped.append(len(pack_ids))
        self.num_chunks = 0
        return self.freed_bytes


def test_a_namespace_that_ends_while_another_s_packs_are_dropped_is_no_error() -> None:
    usage = DiskUsage(limit_bytes=80)
    first = HoleyNamespace("a", usage, value=1.0)
    second = HoleyNamespace("b", usage, value=1.0)
    capacity = capacity_of(usage, first, second)
    first.ended = capacity._namespaces  # type: ignore[assignment]
    asyncio.run(capacity.find_disk_capacity(50))
    assert (first.dropped, second.dropped) == ([1], [1])


def test_when_nothing_is_left_to_drop_it_stops() -> None:
    usage = DiskUsage(limit_bytes=80)
    only = FakeNamespace("only", usage, value=1.0)
    usage.add("pinned", 40)
    asyncio.run(capacity_of(usage, only).find_disk_capacity(60))
    assert only.num_chunks == 0
    assert not usage.fits(60)


def test_the_file_system_counts_as_the_quota_does() -> None:
    usage = DiskUsage(limit_bytes=1000)
    only = FakeNamespace("only", usage, value=1.0)
    usage.measured(15)
    assert not usage.fits(30)
    asyncio.run(capacity_of(usage, only).find_disk_capacity(30))
    assert only.dropped == [2]
    assert usage.fits(30)


def test_where_nothing_is_short_nothing_is_dropped() -> None:
    """Not even no bytes: that waits for the index, which may be recording a compaction."""
    usage = DiskUsage(limit_bytes=80)
    only = FakeNamespace("only", usage, value=1.0)
    for num_bytes in (30, 40):
        asyncio.run(capacity_of(usage, only).find_disk_capacity(num_bytes))
    assert (only.dropped, usage.shortage(40)) == ([], 0)
    asyncio.run(capacity_of(usage, only).find_disk_capacity(50))
    assert (only.dropped, usage.shortage(50)) == ([1], 0)


def test_the_watermark_trims_down_to_the_low_one_and_holes_are_not_its_matter() -> None:
    usage = DiskUsage(limit_bytes=80)
    one = FakeNamespace("one", usage, value=1.0, num_chunks=7)
    capacity = capacity_of(usage, one)
    assert asyncio.run(capacity.trim_disk()) == 0
    usage.add("holes", 8)
    assert asyncio.run(capacity.trim_disk()) == 30
    usage.add("more-holes", 30)
    assert asyncio.run(capacity.trim_disk()) == 0, "chunks take the low share only"


def test_a_ledger_that_refuses_does_not_end_the_trimming_for_good(caplog: pytest.LogCaptureFixture) -> None:
    usage = DiskUsage(limit_bytes=80)
    one = FakeNamespace("one", usage, value=1.0, num_chunks=8, error=LedgerError("disk I/O error"))
    capacity = capacity_of(usage, one)
    for _ in range(3):
        assert asyncio.run(capacity.trim_disk()) == 0
    assert caplog.text.count("disk_not_trimmed") == 1, "a full disk does not get four lines a second besides"
    one.error = None
    assert asyncio.run(capacity.trim_disk()) == 40
