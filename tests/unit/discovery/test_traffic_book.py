"""Counts of how many namespaces are in memory, and what becomes of those that are not."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.concurrency.tasks import Tasks
from kvtier.discovery.saved_traffic import SavedTraffic
from kvtier.discovery.traffic_book import MAX_NAMESPACES, TrafficBook

NUM_NAMESPACES = 3 * MAX_NAMESPACES


class Rig:
    """A book whose namespaces are all asked for at once, as at a start. One background thread, as in the daemon."""

    def __init__(self, folder: Path) -> None:
        self.namespaces: dict[str, Any] = {
            str(number): SimpleNamespace(namespace_id=str(number), tasks=Tasks()) for number in range(NUM_NAMESPACES)
        }
        self._one = asyncio.Lock()
        config = SimpleNamespace(disk=SimpleNamespace(disk_dir=folder))
        resources: Any = SimpleNamespace(config=config, ledger=SimpleNamespace(ring=None), in_background=self._call)
        prompts: Any = SimpleNamespace(pinned=lambda: ())
        self.book = TrafficBook(resources, prompts, self.namespaces)

    async def _call(self, call: Any, *args: Any) -> Any:
        async with self._one:
            await asyncio.sleep(0)
            return call(*args)

    async def ask_for_all(self) -> None:
        for namespace in self.namespaces.values():
            self.book.of(namespace)
        for namespace in self.namespaces.values():
            await namespace.tasks.join()

    @property
    def in_memory(self) -> list[str]:
        return [namespace.namespace_id for namespace, _ in self.book.current()]


def test_those_that_were_used_longest_ago_leave_memory(tmp_path: Path) -> None:
    """All picked the same one to leave, so that one of forty left, and never more."""

    async def scenario() -> None:
        rig = Rig(tmp_path)
        await rig.ask_for_all()
        assert rig.in_memory == list(rig.namespaces)[-MAX_NAMESPACES:]

    asyncio.run(scenario())


def test_counts_that_cannot_be_written_stay_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = SavedTraffic.load

    def load_changed(self: SavedTraffic, namespace_id: str) -> Any:
        traffic = load(self, namespace_id)
        traffic.is_saved = False
        return traffic

    def refuse(self: SavedTraffic, *_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SavedTraffic, "load", load_changed)
    monkeypatch.setattr(SavedTraffic, "write", refuse)

    async def scenario() -> None:
        rig = Rig(tmp_path)
        await rig.ask_for_all()
        assert rig.in_memory == list(rig.namespaces)[-2 * MAX_NAMESPACES :]

    asyncio.run(scenario())
