"""What is read to be verified: every chunk once, also when requests come and go while it is read."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from kvtier.core.layout import ChunkKey
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.maintenance.prompt_verification import PromptVerification
from kvtier.tiering.pacing import RequestReads
from kvtier.upkeep.scrubber import CURSOR_FILE, Scrubber
from tests.fakes.rig import Rig, keys_of, rig
from tests.unit.maintenance.test_prompt_verification import pinned


@contextmanager
def reading_files(r: Rig, tmp_path: Path) -> Iterator[list[ChunkKey]]:
    """Write and read real packs, which tell what is to be left out chunk by chunk; yields what was verified."""
    tier, verified = PackTier(tmp_path / "real-packs"), list[ChunkKey]()
    decode = tier._reader._decode

    def noted(read: object, stored: object) -> object:
        verified.append(read.chunk.key)  # type: ignore[attr-defined]
        return decode(read, stored)  # type: ignore[arg-type]

    with (
        mock.patch.object(r.tier, "write_pack", tier.write_pack),
        mock.patch.object(r.tier, "read_chunks", tier.read_chunks),
        mock.patch.object(tier._reader, "_decode", noted),
    ):
        yield verified


def request_during(question: int) -> "mock._patch[mock.PropertyMock]":
    """A request waits for the disk only when that is asked for this time, counted from 0."""
    answers = iter([False] * question + [True])
    return mock.patch.object(RequestReads, "busy", mock.PropertyMock(side_effect=lambda: next(answers, False)))


@pytest.mark.parametrize("question", range(6))
def test_a_scrub_leaves_out_no_chunk_for_a_request_that_comes_and_goes(tmp_path: Path, question: int) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            with reading_files(r, tmp_path) as verified:
                await r.on_disk(range(6))
                await r.namespace.index.drop(keys_of([1]))  # a hole: the others are copied before they are verified
                scrubber = Scrubber(
                    r.resources, lambda: [r.namespace.tiers], r.resources.config.disk.disk_dir / CURSOR_FILE
                )
                with request_during(question):
                    await scrubber.scrub_pass()
                assert sorted(verified) == sorted(keys_of([0, 2, 3, 4, 5]))

    asyncio.run(scenario())


@pytest.mark.parametrize("question", range(6))
def test_a_verified_prompt_was_read_whole(tmp_path: Path, question: int) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            with reading_files(r, tmp_path) as verified:
                await pinned(r, range(4))
                await r.on_disk([1, 0, 3, 2])
                with request_during(question):
                    (found,) = (await PromptVerification(r.cache).run("p")).namespaces
                assert found.disk.num_verified_chunks == 4
                assert sorted(verified) == sorted(keys_of(range(4)))

    asyncio.run(scenario())
