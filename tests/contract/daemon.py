"""What an engine may rely on: the engine protocol, as `proto/kvtier/v1/engine.proto` says it, seen from a session."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import pytest

from kvtier._pb import engine_pb2 as pb
from kvtier.config import DaemonConfig
from kvtier.core.arena_format import key_tag_of
from tests.fakes.arena_file import is_locked
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, residencies

KEYS = [chunk_key(number) for number in range(3)]
OTHERS = [chunk_key(number) for number in range(3, 12)]
HOST, PROMOTING = pb.ChunkResidency.HOST, pb.ChunkResidency.PROMOTING


class Subject(Protocol):
    """The daemon under test, and what an operator does to it."""

    config: DaemonConfig

    async def pin(self, name: str, num_chunks: int) -> str:
        """Pin a prompt; return the pin's id."""

    async def unpin(self, name: str, pin_id: str) -> None:
        """End the promise and forget the prompt."""

    async def move_to_disk(self, name: str) -> None:
        """Have the prompt's chunks on disk only."""


Open = Callable[[Path, bool], AbstractAsyncContextManager[Subject]]


class DaemonContract:
    """Subclasses give `opened`."""

    @pytest.fixture
    def opened(self) -> Open:
        raise NotImplementedError

    @pytest.fixture
    def play(self, opened: Open, tmp_path: Path) -> Callable[..., None]:
        """Run a scenario beside a daemon, and an engine that has bound a prompt of KEYS."""

        def run(scenario: Callable[..., Coroutine[Any, Any, None]], *, stores_all: bool = False) -> None:
            async def played() -> None:
                async with opened(tmp_path, stores_all) as daemon:
                    pin_id = await daemon.pin("p", len(KEYS))
                    async with ScriptedEngine(daemon.config) as engine:
                        await engine.bind(pin_id, KEYS)
                        await scenario(daemon, engine)

            asyncio.run(played())

        return run

    def test_a_welcome_names_the_pins_the_arena_and_a_lock(self, play: Callable[..., None]) -> None:
        async def scenario(daemon: Subject, engine: ScriptedEngine) -> None:
            welcome = engine.welcome
            (pin,) = welcome.pins
            assert (pin.name, pin.pinned, len(pin.tokens)) == ("p", True, 16 * len(KEYS))
            assert list(welcome.pin_ids) == [pin.pin_id]
            assert welcome.session_id
            assert is_locked(Path(welcome.lock_path)), "by the engine; the daemon made the file"
            assert engine.arena.geometry.row_bytes == welcome.arena.row_bytes

        play(scenario)

    def test_an_engine_has_the_slots_that_it_asked_for_and_others_for_those_that_it_uses(
        self, play: Callable[..., None]
    ) -> None:
        async def scenario(daemon: Subject, engine: ScriptedEngine) -> None:
            wanted = engine.hello.store_credits
            while len(engine.credits) < wanted:
                await engine.receive("store_credits")
            assert len({ref.slot for ref in engine.credits}) == wanted
            for ref in engine.credits:
                assert engine.arena.generation(ref.slot) == ref.generation
            used = [await engine.take_credit() for _ in range(wanted)]
            stores = [pb.StoreSlot(key=key, slot=ref) for key, ref in zip(OTHERS, used, strict=False)]
            await engine.send(store_begin=pb.StoreBegin(stores=stores))
            while len(engine.credits) < wanted:
                await engine.receive("store_credits")
            assert not {ref.slot for ref in engine.credits} & {ref.slot for ref in used}
            await engine.send(store_abort=pb.StoreAbort(stores=stores))
            await engine.barrier()

        play(scenario)

    def test_what_is_stored_is_held_and_read_as_it_was_written(self, play: Callable[..., None]) -> None:
        async def scenario(daemon: Subject, engine: ScriptedEngine) -> None:
            assert await engine.verify(1, KEYS) == []
            await engine.store(KEYS[:2])
            assert await engine.verify(2, KEYS) == [0, 1]
            await engine.store(KEYS[2:])
            assert await engine.verify(3, KEYS) == [0, 1, 2]

        play(scenario)

    def test_a_chunk_whose_row_was_not_stamped_is_not_held(self, play: Callable[..., None]) -> None:
        async def scenario(daemon: Subject, engine: ScriptedEngine) -> None:
            ref = await engine.take_credit()
            stores = [pb.StoreSlot(key=KEYS[0], slot=ref)]
            await engine.send(store_begin=pb.StoreBegin(stores=stores))
            engine.write(KEYS[0], ref, stamp_generation=ref.generation - 1)
            await engine.send(store_done=pb.StoreDone(stores=stores))
            await engine.barrier()
            assert not engine.held[KEYS[0]]
            assert await engine.verify(1, KEYS) == []
            await engine.store(KEYS[:1])
            assert await engine.verify(2, KEYS) == [0]

        play(scenario)

    def test_a_stamp_of_another_chunk_is_none(self, play: Callable[..., None]) -> None:
        async def scenario(daemon: Subject, engine: ScriptedEngine) -> None:
            ref = await engine.take_credit()
            stores = [pb.StoreSlot(key=KEYS[0], slot=ref)]
            await engine.send(store_begin=pb.StoreBegin(stores=stores))
            engine.arena.stamp(ref.slot, 0, key_tag_of(KEYS[1]), ref.generation, 6000)
            await engine.send(store_done=pb.StoreDone(stores=stores))
            await engine.barrier()
            assert not engine.held[KEYS[0]]

        play(scenario)

    def test_a_chunk_that_is_held_may_be_stored_once_more(self, play: Callable[..., None]) -> None:
        async def scenario(daemon: Subject, engine: ScriptedEngine) -> None:
            for _ in range(3):
                await engine.store(KEYS)
                await engine.barrier()
                assert await engine.verify(1, KEYS) == [0, 1, 2]

        play(scenario)

    def test_what_is_on_disk_is_promoted_and_read_as_it_was_written(self, play: Callable[..., None]) -> None:
        async def scenario(daemon: Subject, engine: ScriptedEngine) -> None:
            await engine.store(KEYS)
            await daemon.move_to_disk("p")
            await engine.send(acquire=pb.Acquire(acquire_id=1, keys=[*KEYS, *OTHERS]))
            states: dict[int, list[int]] = {}
            while [each[-1] for each in states.values()] != [HOST] * len(KEYS):
                update = (await engine.receive("acquire_update")).acquire_update
                assert update.acquire_id == 1
                for chunk in residencies(update):
                    states.setdefault(chunk.index, []).append(chunk.state)
            assert set(states) == {0, 1, 2}, "what is not held is not named"
            assert all(each[0] in (HOST, PROMOTING) for each in states.values())
            await engine.release(1)
            assert await engine.verify(2, KEYS) == [0, 1, 2]

        play(scenario)

    def test_a_part_of_an_acquire_can_be_released(self, play: Callable[..., None]) -> None:
        async def scenario(daemon: Subject, engine: ScriptedEngine) -> None:
            await engine.store(KEYS)
            await engine.acquire(1, KEYS)
            await engine.send(release=pb.Release(acquire_id=1, indexes=[0, 2]))
            await engine.send(release=pb.Release(acquire_id=1, indexes=[1]))
            await engine.release(1)  # what is released already is ignored
            assert await engine.verify(1, KEYS) == [0, 1, 2], "the id is free again"

        play(scenario)

    def test_a_ping_is_answered_with_its_number(self, play: Callable[..., None]) -> None:
        async def scenario(daemon: Subject, engine: ScriptedEngine) -> None:
            for number in (99, 2**63):
                await engine.send(ping=pb.Ping(id=number))
                assert (await engine.receive("pong")).pong.id == number

        play(scenario)

    def test_a_later_pin_and_its_end_are_notified(self, play: Callable[..., None]) -> None:
        async def scenario(daemon: Subject, engine: ScriptedEngine) -> None:
            pin_id = await daemon.pin("q", len(KEYS))
            pin = (await engine.receive("pin_added")).pin_added.pin
            assert (pin.pin_id, pin.name) == (pin_id, "q")
            await daemon.unpin("q", pin_id)
            assert (await engine.receive("pin_removed")).pin_removed.pin_id == pin_id

        play(scenario)

    def test_with_store_all_the_inventory_is_complete_and_every_chunk_is_kept(self, play: Callable[..., None]) -> None:
        async def scenario(daemon: Subject, engine: ScriptedEngine) -> None:
            await engine.store([*KEYS, *OTHERS])
            assert engine.welcome.store_mode == pb.STORE_ALL
            async with ScriptedEngine(daemon.config, engine_id="later") as later:
                await later.wait_inventory()
                assert {key for key, held in later.held.items() if held} == {*KEYS, *OTHERS}
                assert await later.verify(1, OTHERS) == list(range(len(OTHERS)))

        play(scenario, stores_all=True)

    def test_after_a_goodbye_the_next_engine_finds_what_was_stored(self, play: Callable[..., None]) -> None:
        async def scenario(daemon: Subject, engine: ScriptedEngine) -> None:
            await engine.store(KEYS)
            await engine.send(goodbye=pb.Goodbye())
            await engine.cut()
            async with ScriptedEngine(daemon.config, engine_id="next") as following:
                (pin,) = following.welcome.pins
                await following.bind(pin.pin_id, KEYS)
                assert [following.held[key] for key in KEYS] == [True] * len(KEYS)
                assert await following.verify(1, KEYS) == [0, 1, 2]

        play(scenario)
