"""Nothing on the event loop takes longer the more is pinned, or the more a client sends.

An attack pinned 100 prompts of 64k tokens: any Pin took half a second, in which no engine got an answer, and so did
another engine's attaching and a list. What is not known ahead is looked at in slices, with turns of the loop between.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest

from kvtier.core.chunks import ChunkTable
from kvtier.core.layout import ChunkKey
from kvtier.errors import QuotaExceededError
from kvtier.service.prompts import PinWish
from kvtier.service.turns import SLICE_KEYS
from tests.fakes.rig import Rig, keys_of, rig
from tests.fakes.scripted_engine import ONE_GROUP
from tests.fakes.turns import num_turns

PAYLOAD_BYTES = ONE_GROUP.payload_bytes(0)


async def bound(r: Rig, name: str, keys: Sequence[ChunkKey]) -> None:
    """Pin a prompt of so many chunks and bind it."""
    session, _ = await r.session()
    view = await r.cache.pins.pin(PinWish(name=name, tokens=tuple(range(16 * len(keys)))))
    await r.cache.bind(session, view.prompt.pin_id, keys, 16 * len(keys), "")


def test_a_pin_does_not_look_at_the_chunks_of_other_pins(tmp_path: Path) -> None:
    async def num_looks(num_keys: int) -> int:
        async with rig(tmp_path / str(num_keys)) as r:
            await bound(r, "other", keys_of(range(num_keys)))
            with mock.patch.object(ChunkTable, "get", autospec=True, side_effect=ChunkTable.get) as looked:
                await r.cache.pins.pin(PinWish(name="p", tokens=tuple(range(32))))
            return looked.call_count

    for number in (2, 200):
        (tmp_path / str(number)).mkdir()
    assert asyncio.run(num_looks(2)) == asyncio.run(num_looks(200))


def test_the_quota_counts_what_is_bound_and_what_will_be(tmp_path: Path) -> None:
    async def scenario() -> None:
        # Room for ten chunks: two and three of these are bound and stand on no disk, one is not bound yet.
        async with rig(tmp_path, disk_bytes=10 * PAYLOAD_BYTES) as r:
            await bound(r, "a", keys_of(range(2)))
            await bound(r, "b", keys_of(range(2, 5)))
            await r.cache.pins.pin(PinWish(name="c", tokens=tuple(range(16))))

            async def refused(name: str, num_chunks: int) -> QuotaExceededError:
                with pytest.raises(QuotaExceededError) as caught:
                    await r.cache.pins.pin(PinWish(name=name, tokens=tuple(range(16 * num_chunks)), replace=True))
                return caught.value

            error = await refused("d", 5)
            assert (error.needed_bytes, error.used_bytes) == (5 * PAYLOAD_BYTES, 6 * PAYLOAD_BYTES)
            error = await refused("b", 8)  # whose own three chunks do not count
            assert (error.needed_bytes, error.used_bytes) == (8 * PAYLOAD_BYTES, 3 * PAYLOAD_BYTES)
            await r.cache.pins.pin(PinWish(name="d", tokens=tuple(range(16 * 4))))
            r.cache.prompts.check()

    asyncio.run(scenario())


def test_a_long_prompt_is_looked_at_in_slices(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await bound(r, "p", keys_of(range(5 * SLICE_KEYS)))
            view, turns = await num_turns(r.cache.pins.view("p"))
            assert view.bindings[0].num_chunks == 5 * SLICE_KEYS
            assert turns >= 4

    asyncio.run(scenario())
