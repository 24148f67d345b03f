"""A folder whose file server is gone: nothing waits for it, the removal of what broke included.

And one whose file system is not mounted.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvtier.errors import RemoteUnavailableError
from kvtier.remote.base import one_piece
from kvtier.remote.folder_store import FolderStore
from tests.fakes.rig import eventually

DEADLINE_S = 30.0


@pytest.fixture
def is_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Calls that remove files hang until this is set."""
    is_back, unlink = threading.Event(), Path.unlink

    def hanging(path: Path, missing_ok: bool = False) -> None:
        is_back.wait(DEADLINE_S)
        unlink(path, missing_ok)

    monkeypatch.setattr("kvtier.remote.folder_store._CLOSE_S", 0.1)
    monkeypatch.setattr(Path, "unlink", hanging)
    yield is_back
    is_back.set()


async def broken() -> AsyncIterator[bytes]:
    yield b"1"
    raise ValueError("broken")


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b"1"
        await asyncio.sleep(0.001)


def left_in(folder: Path) -> list[Path]:
    return list((folder / ".tmp").iterdir())


def test_no_one_waits_for_the_removal_of_a_write_that_broke(tmp_path: Path, is_back: threading.Event) -> None:
    """The loop itself removed it: a daemon whose file server was gone answered no engine any longer."""

    async def test() -> None:
        store, began_s = FolderStore(f"file://{tmp_path}"), time.monotonic()
        with pytest.raises(ValueError, match="broken"):
            await store.put_stream("kv/a", broken())
        assert time.monotonic() - began_s < DEADLINE_S / 2
        assert len(left_in(tmp_path)) == 1
        await store.put_stream("kv/b", one_piece(b"1"))
        assert await store.get_range("kv/b", 0, 9) == b"1", "the store is used meanwhile"
        is_back.set()
        await eventually(lambda: not left_in(tmp_path))

    asyncio.run(test())


def test_the_stop_of_a_daemon_does_not_wait_for_a_removal_that_hangs(tmp_path: Path, is_back: threading.Event) -> None:
    async def test() -> None:
        store = FolderStore(f"file://{tmp_path}")
        writing = asyncio.create_task(store.put_stream("kv/a", endless()))
        await eventually(lambda: (tmp_path / ".tmp").exists() and bool(left_in(tmp_path)))
        began_s = time.monotonic()
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        await store.close()
        assert time.monotonic() - began_s < DEADLINE_S / 2
        assert len(left_in(tmp_path)) == 1

    asyncio.run(test())


def test_a_write_that_the_stop_of_a_daemon_breaks_leaves_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        store = FolderStore(f"file://{tmp_path}")
        writing = asyncio.create_task(store.put_stream("kv/a", endless()))
        await eventually(lambda: (tmp_path / ".tmp").exists() and bool(left_in(tmp_path)))
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        await store.close()
        assert left_in(tmp_path) == []

    asyncio.run(test())


def test_a_folder_whose_file_system_is_not_mounted_is_away_and_not_made_in_its_place(tmp_path: Path) -> None:
    """It was made on the local disk, an empty store of this host alone, and the other hosts' pins were not there."""
    folder = tmp_path / "mount" / "kvtier"

    async def test() -> None:
        store = FolderStore(f"file://{folder}")
        for call in (
            store.get("pins/a"),
            store.head("pins/a"),
            store.put_new("pins/a", b"1"),
            store.put_stream("kv/a", broken()),
            store.delete("pins/a"),
            anext(store.list("pins/")),
        ):
            with pytest.raises(RemoteUnavailableError, match=rf"no folder {folder}; mount"):
                await call
        assert not folder.parent.exists()
        folder.mkdir(parents=True)
        assert await store.put_new("pins/a", b"1") is not None, "mounted meanwhile"

    asyncio.run(test())
