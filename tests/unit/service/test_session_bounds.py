"""A session at its exact bounds: what it takes, counts and sends, and what it frees for others."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kvtier.core import limits
from kvtier.core.slots import SlotRef, SlotState
from kvtier.errors import InvalidArgumentError
from kvtier.ledger import BindingRow, PromptRow
from kvtier.sessions import loads as loads_module
from kvtier.sessions import session as session_module
from kvtier.sessions import stores as stores_module
from kvtier.sessions.engine_peer import MAX_PIN_BATCH_BYTES, KnownPin
from kvtier.sessions.session import Session
from tests.fakes.clocks import at_rest
from tests.fakes.rig import ListPeer, Rig, at_once, eventually, hello_of, keys_of, rig
from tests.fakes.scripted_engine import chunk_key, host_bytes_for

CHUNK_BYTES = 6000


@dataclass(eq=False)
class WatchedPeer(ListPeer):
    """Keeps its credits, and what it was sent of pins."""

    credits: list[SlotRef] = field(default_factory=list)
    pin_messages: list[list[str]] = field(default_factory=list)
    is_complete: bool = False

    def credits_granted(self, slots: Sequence[SlotRef]) -> None:
        """See EnginePeer."""
        assert slots, "a message of nothing"
        self.credits += slots

    def pin_added(self, prompt: PromptRow) -> None:
        """See EnginePeer."""
        self.pin_messages.append([prompt.name])

    def pins_added(self, pins: Sequence[KnownPin]) -> None:
        """See EnginePeer."""
        assert pins, "a message of nothing"
        self.pin_messages.append([pin.prompt.name for pin in pins])

    def chunks_held(self, keys: Sequence[bytes], held: bool, *, complete: bool = False) -> None:
        """See EnginePeer."""
        super().chunks_held(keys, held, complete=complete)
        self.is_complete = self.is_complete or complete


def scenario(
    folder: Path,
    run: Callable[[Rig, Session, WatchedPeer], Awaitable[None]],
    store_credits: int = 1,
    **settings: object,
) -> None:
    """Run with a cache and a session of it."""

    async def all_of_it() -> None:
        async with rig(folder, **settings) as r:
            peer = WatchedPeer()
            session = await r.cache.attach(replace(hello_of("bounds"), store_credits=store_credits), peer)
            await run(r, session, peer)

    asyncio.run(all_of_it())


def prompt(name: str = "p", num_tokens: int = 4, model: str = "") -> PromptRow:
    return PromptRow(
        name=name,
        pin_id=name,
        pinned=True,
        tokens=tuple(range(num_tokens)),
        model=model,
        lora_name="",
        lora_path="",
        cache_salt="",
        recipe_json="",
        created_unix_s=0.0,
        expires_unix_s=0.0,
    )


# Pins


@pytest.mark.parametrize(
    ("num_tokens", "model", "is_served"), [(4, "", True), (4, "model", True), (4, "other", False), (0, "", False)]
)
def test_an_engine_is_sent_rendered_prompts_of_its_model(
    tmp_path: Path, num_tokens: int, model: str, is_served: bool
) -> None:
    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        row = prompt(num_tokens=num_tokens, model=model)
        assert session.serves(row) is is_served
        await session.send_pins({"p": KnownPin(row)}.get, ["p", "gone"])
        assert peer.pin_messages == ([["p"]] if is_served else [])

    scenario(tmp_path, run)


@pytest.mark.parametrize(("num_more", "messages"), [(0, [["a", "b"], ["c"]]), (1, [["a"], ["b", "c"]])])
def test_pins_go_together_up_to_exactly_the_bound_of_a_message(
    tmp_path: Path, num_more: int, messages: list[list[str]]
) -> None:
    def of_bytes(name: str, num_bytes: int) -> KnownPin:
        pin = KnownPin(prompt(name, (num_bytes - 64) // 3))
        assert pin.about_bytes == num_bytes
        return pin

    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        least = MAX_PIN_BATCH_BYTES // 2 // 3 * 3 + 64 % 3
        rest = MAX_PIN_BATCH_BYTES - least
        rest -= (rest - 64) % 3
        pins = {"a": of_bytes("a", least), "b": of_bytes("b", rest + 3 * num_more), "c": of_bytes("c", 67 + 3)}
        slack = MAX_PIN_BATCH_BYTES - least - rest
        assert 0 <= slack < 3
        await session.send_pins(pins.get, ["a", "b", "c"])
        assert peer.pin_messages == messages

    scenario(tmp_path, run)


def test_a_session_that_has_ended_is_sent_nothing(tmp_path: Path) -> None:
    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        r.in_host([0])
        session.lost()
        held = dict(peer.held)
        await session.send_pins({"p": KnownPin(prompt())}.get, ["p"])
        await session.send_held(keys_of([0, 1]))
        await session.send_pins_held([binding("p", [0])])
        await session.send_inventory()
        assert (peer.pin_messages, peer.held, peer.held_pins, peer.is_complete) == ([], held, [], False)

    scenario(tmp_path, run)


def test_what_is_held_and_what_is_not_is_said_apart(tmp_path: Path) -> None:
    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        r.in_host([0])
        await r.on_disk([2])
        await session.send_held(keys_of(range(4)))
        assert [peer.held[chunk_key(number)] for number in range(4)] == [True, False, True, False]
        assert not peer.is_complete

    scenario(tmp_path, run)


def binding(pin_id: str, numbers: Sequence[int]) -> BindingRow:
    return BindingRow(pin_id=pin_id, namespace_id="n", keys=tuple(keys_of(numbers)), covered_tokens=1)


def test_pins_that_are_held_whole_are_named_by_their_ids(tmp_path: Path) -> None:
    """An engine that attached to 10,000 pins was sent all of their keys once more, only to learn that all are there."""

    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        r.in_host([0])
        await r.on_disk([1, 2])
        peer.held.clear()
        await session.send_pins_held([binding("a", [0, 1]), binding("b", [1, 3]), binding("c", [2])])
        assert peer.held_pins == ["a", "c"]
        assert peer.held == {chunk_key(1): True, chunk_key(3): False}

    scenario(tmp_path, run)


def test_a_long_pin_is_looked_at_over_several_turns_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "SLICE_KEYS", 2)

    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        r.in_host([0, 1, 2])
        peer.held.clear()
        await session.send_pins_held([binding("long", [0, 1, 2]), binding("short", [0, 1])])
        assert peer.held_pins == ["short"]
        assert peer.held == dict.fromkeys(keys_of(range(3)), True)

    scenario(tmp_path, run)


def test_an_inventory_names_what_is_held_and_says_that_it_is_complete(tmp_path: Path) -> None:
    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        r.in_host([0])
        await r.on_disk([2])
        r.table.pin([chunk_key(5)])  # known, and not held
        peer.held.clear()
        await session.send_inventory()
        assert peer.held == {chunk_key(0): True, chunk_key(2): True}
        assert peer.is_complete is True

    scenario(tmp_path, run)


# The engine's speed


@pytest.mark.parametrize("factor", [1.0, 0.999, 1.001])
@pytest.mark.parametrize("bound", [0, 1])
def test_a_speed_is_taken_up_to_its_bounds(tmp_path: Path, bound: int, factor: float) -> None:
    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        speed = limits.PREFILL_TOKENS_PER_S[bound] * factor
        if factor == 1.0 or (factor > 1) == (bound == 0):
            session.measured(speed)
            assert r.namespace.cost.prefill_tokens_per_s == speed
            return
        with pytest.raises(InvalidArgumentError, match=r"engine_rates\.prefill_tokens_per_s"):
            session.measured(speed)
        assert r.namespace.cost.prefill_tokens_per_s != speed

    scenario(tmp_path, run)


# Loads


def test_as_many_acquires_and_chunks_as_allowed_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "MAX_ACQUIRES", 2)
    monkeypatch.setattr(limits, "MAX_LEASED_CHUNKS", 3)

    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        keys = r.in_host(range(4))
        at_once(session.loads.acquire(1, keys[:2]))
        at_once(session.loads.acquire(2, keys[:2]))
        assert (session.loads.num_acquires, session.loads.num_leases) == (1, 2), "four chunks would be one too many"
        at_once(session.loads.acquire(2, keys[2:3]))
        assert (session.loads.num_acquires, session.loads.num_leases) == (2, 3)
        at_once(session.loads.release(1, None))
        at_once(session.loads.acquire(3, keys[:1]))
        at_once(session.loads.acquire(4, keys[:1]))
        assert (session.loads.num_acquires, session.loads.num_leases) == (2, 2), "three acquires would be"
        assert [len(peer.answers[number][0]) for number in (1, 2, 3, 4)] == [2, 1, 1, 0]
        assert (r.counters.acquires, r.counters.missed_chunks_over_limit) == (5, 3)
        assert caplog.text.count("session_over_limit") == 1
        assert session.is_busy is True

    scenario(tmp_path, run)


@pytest.mark.parametrize("again", [False, True])
def test_an_id_is_in_use_until_it_is_released(tmp_path: Path, again: bool) -> None:
    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        keys = r.in_host(range(2))
        at_once(session.loads.acquire(1, keys, b"name"))
        acquire_again = session.loads.acquire_again if again else lambda *_: at_once(session.loads.acquire(1, keys))
        with pytest.raises(InvalidArgumentError, match="acquire_id"):
            acquire_again(1, b"name")
        at_once(session.loads.release(1, None))
        assert session.loads.acquire_again(1, b"name") is True
        assert session.loads.num_leases == 2

    scenario(tmp_path, run)


@pytest.mark.parametrize(
    ("name", "numbers", "is_remembered"),
    [(b"name", [0, 1], True), (b"", [0, 1], False), (b"name", [0, 9], False), (b"name", [0, 5], False)],
    ids=["all in memory", "without a name", "one missing", "one on disk"],
)
def test_only_a_named_list_that_was_all_in_memory_is_remembered(
    tmp_path: Path, name: bytes, numbers: list[int], is_remembered: bool
) -> None:
    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        r.in_host(range(2))
        await r.on_disk([5])
        at_once(session.loads.acquire(1, keys_of(numbers), name))
        await at_rest(r.resources)
        assert session.loads.acquire_again(2, name) is is_remembered
        assert r.counters.acquires == 1 + is_remembered

    scenario(tmp_path, run)


def test_a_list_that_is_acquired_again_counts_like_the_first_time(tmp_path: Path) -> None:
    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        keys = r.in_host(range(3))
        at_once(session.loads.acquire(1, keys, b"name"))
        counters = r.counters
        first = (counters.acquires, counters.hit_chunks_host, counters.hit_bytes_host)
        assert first == (1, 3, 3 * CHUNK_BYTES)
        assert session.loads.acquire_again(2, b"name")
        assert (counters.acquires, counters.hit_chunks_host, counters.hit_bytes_host) == (2, 6, 6 * 6000)
        assert (counters.missed_chunks_absent, counters.hit_chunks_disk, counters.hit_bytes_disk) == (0, 0, 0)

    scenario(tmp_path, run)


def test_an_answer_is_counted_by_tier_and_what_it_lacks(tmp_path: Path) -> None:
    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        r.in_host(range(2))
        await r.on_disk([5])
        at_once(session.loads.acquire(1, keys_of([0, 1, 5, 8, 9])))
        await at_rest(r.resources)
        counters = r.counters
        assert (counters.hit_chunks_host, counters.hit_chunks_disk, counters.missed_chunks_absent) == (2, 1, 2)
        assert (counters.hit_bytes_host, counters.hit_bytes_disk) == (2 * CHUNK_BYTES, CHUNK_BYTES)
        assert (counters.missed_chunks_no_slot, counters.missed_chunks_disk_off) == (0, 0)

    scenario(tmp_path, run)


@pytest.mark.parametrize("indexes", [None, [0, 1]])
@pytest.mark.parametrize("named", [False, True])
def test_a_release_lets_others_have_credits(tmp_path: Path, indexes: list[int] | None, named: bool) -> None:
    """All slots hold leased chunks: a session without credits gets them when a release makes one evictable."""

    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        num_slots = r.namespace.host.usage.num_affordable
        await r.on_disk(range(num_slots))  # so that what is in memory may be evicted
        session.stores.top_up()
        await at_rest(r.resources)
        at_once(session.loads.acquire(7, keys_of(range(num_slots))))
        await at_rest(r.resources)
        name = b"name" if named else b""
        at_once(session.loads.acquire(1, keys_of(range(2)), name))
        at_once(session.loads.release(7, list(range(2))))
        waiting = WatchedPeer()
        other = await r.cache.attach(replace(hello_of("waits"), store_credits=2), waiting)
        other.stores.top_up()
        await at_rest(r.resources)
        had = len(waiting.credits)
        at_once(session.loads.release(1, indexes))
        await at_rest(r.resources)
        assert len(waiting.credits) > had
        assert session.loads.num_acquires == 1

    scenario(tmp_path, run, host_bytes=host_bytes_for(8))


def test_a_chunk_that_comes_twice_is_refused_before_anything_is_leased(tmp_path: Path) -> None:
    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        keys = r.in_host(range(2))
        with pytest.raises(InvalidArgumentError, match="each key may come once"):
            at_once(session.loads.acquire(1, [*keys, keys[0]]))
        assert (session.loads.num_acquires, r.counters.acquires) == (0, 0)

    scenario(tmp_path, run)


def test_parts_of_a_long_answer_say_what_was_read_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of two: what became readable, or failed, between the parts is reported after the last."""
    monkeypatch.setattr(loads_module, "SLICE_KEYS", 2)
    monkeypatch.setattr(loads_module, "slices", lambda keys: [keys[at : at + 2] for at in range(0, len(keys), 2)])

    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        await r.on_disk(range(5))
        r.tier.unreadable = {chunk_key(1)}
        steps = session.loads.acquire(1, keys_of(range(5)))
        for _ in steps:
            await at_rest(r.resources)
        leased, forecast = peer.answers[1]
        assert sorted({*peer.all_ready(), *(chunk.index for chunk in leased if not chunk.promoting)}) == [0, 2, 3, 4]
        assert peer.missed.get(1, []) == [1] or 1 not in {chunk.index for chunk in leased}
        assert forecast.pending_bytes == 0
        assert session.loads.num_leases == 4

    scenario(tmp_path, run)


def test_what_was_promoted_for_a_request_is_evicted_tail_first_after_it(tmp_path: Path) -> None:
    """Chunks become readable head first, so the tail would look the most recent."""

    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        await r.on_disk(range(4))
        at_once(session.loads.acquire(1, keys_of(range(4))))
        await at_rest(r.resources)
        at_once(session.loads.release(1, None))
        r.table.host.evict_cheapest(2)
        assert [r.chunk(number).slot is not None for number in range(4)] == [True, True, False, False]

    scenario(tmp_path, run)


def test_the_end_of_a_lease_on_what_was_promoted_is_no_use(tmp_path: Path) -> None:
    """It is recency only: else what was asked for once would outlive what was asked for as often since."""

    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        await r.on_disk([0])
        at_once(session.loads.acquire(1, keys_of([0])))
        await at_rest(r.resources)
        at_once(session.loads.release(1, None))
        r.in_host([9])
        r.table.use([r.chunk(9)])
        r.table.host.evict_cheapest(1)
        assert (r.chunk(0).slot is None, r.chunk(9).slot is None) == (True, False)

    scenario(tmp_path, run)


def test_what_is_stored_is_said_and_written_head_first_and_evicted_tail_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        written: list[bytes] = []
        monkeypatch.setattr(session.stores._write_back, "add", lambda keys: written.extend(keys))
        monkeypatch.setattr(session.stores, "_verify", lambda stores: {ref: 7 for _, ref in stores})
        session.stores.top_up()
        await eventually(lambda: len(peer.credits) == 3)
        stores = list(zip(keys_of(range(3)), peer.credits, strict=True))
        session.stores.begin(stores, keys_of(range(3)))
        peer.held.clear()
        session.stores.done(stores)
        await eventually(lambda: r.counters.stored_chunks == 3)
        await at_rest(r.resources)
        assert written == list(peer.held) == keys_of(range(3))
        assert r.counters.stored_bytes == 3 * CHUNK_BYTES
        r.table.host.evict_cheapest(1)
        assert [r.table.holds(key) for key in keys_of(range(3))] == [True, True, False]

    scenario(tmp_path, run, store_credits=3, host_bytes=host_bytes_for(16))


# Stores


@pytest.mark.parametrize(("num_slots", "wanted", "granted"), [(8, 1, 1), (8, 2, 2), (8, 3, 2), (3, 2, 1), (40, 9, 9)])
def test_idle_credits_are_a_quarter_of_the_arena_at_most_and_one_at_least(
    tmp_path: Path, num_slots: int, wanted: int, granted: int
) -> None:
    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        assert r.namespace.host.usage.num_affordable == num_slots
        session.stores.top_up()
        await at_rest(r.resources)
        assert len(peer.credits) == session.stores.num_grants == granted
        assert session.stores.is_writing is False
        assert session.is_busy is False

    scenario(tmp_path, run, store_credits=wanted, host_bytes=host_bytes_for(num_slots))


def test_several_idle_engines_leave_memory_to_what_is_restored(tmp_path: Path) -> None:
    """Each had a quarter: four that stored nothing held all of it for good, and no pinned prompt came from disk."""

    async def scenario() -> None:
        async with rig(tmp_path, host_bytes=host_bytes_for(64)) as r:
            sessions = [*r.cache.sessions]
            for number in range(8):
                hello = replace(hello_of(f"engine-{number}", weights=str(number % 2 + 1)), store_credits=512)
                sessions.append(await r.cache.attach(hello, ListPeer()))
                sessions[-1].stores.top_up()
                await at_rest(r.resources)
            granted = [session.stores.num_grants for session in sessions]
            assert min(granted[1:]) >= 1
            assert sum(granted) <= 44
            assert granted[-1] <= 2
            first = sessions[1].stores
            for ref in first._credits.values():
                r.cache.namespaces[sessions[1].namespace_id].host.release(ref)
            first._credits.clear()
            first.top_up()
            await at_rest(r.resources)
            assert first.num_grants == granted[1], "what it once had comes again, though others came"

    asyncio.run(scenario())


def test_many_credits_come_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine stored nothing until the pages of all its slots were made."""
    monkeypatch.setattr(stores_module, "_MAX_GRANTED_AT_ONCE", 2)
    asked: list[int] = []

    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        allocate = r.namespace.host.allocate

        def watched(num_slots: int) -> Awaitable[list[SlotRef]]:
            asked.append(num_slots)
            return allocate(num_slots)

        monkeypatch.setattr(r.namespace.host, "allocate", watched)
        session.stores.top_up()
        await at_rest(r.resources)
        assert len(peer.credits) == session.stores.num_grants == 5

    scenario(tmp_path, run, store_credits=5, host_bytes=host_bytes_for(40))
    assert asked == [2, 2, 1]


def test_engines_that_store_nothing_take_nothing_from_those_that_do(tmp_path: Path) -> None:
    """Each decode engine made the share of the prefill engine that came after it smaller."""

    async def scenario() -> None:
        async with rig(tmp_path, host_bytes=host_bytes_for(64)) as r:
            for number in range(3):
                await r.cache.attach(replace(hello_of(f"decode-{number}"), store_credits=1), ListPeer())
            prefill = await r.cache.attach(replace(hello_of("prefill"), store_credits=512), ListPeer())
            prefill.stores.top_up()
            await at_rest(r.resources)
            assert prefill.stores.num_grants == 64 // 4

    asyncio.run(scenario())


def test_a_session_that_wants_no_credits_gets_none(tmp_path: Path) -> None:
    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        session.stores.top_up()
        await at_rest(r.resources)
        assert peer.credits == []

    scenario(tmp_path, run, store_credits=0)


def test_credits_that_come_after_the_end_of_the_session_go_to_others(tmp_path: Path) -> None:
    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        session.stores.top_up()
        session.lost()
        await at_rest(r.resources)
        assert (peer.credits, session.stores.num_grants) == ([], 0)
        granted = sum(each.stores.num_grants for each in r.cache.sessions)
        assert r.namespace.host.counts()[SlotState.GRANTED] == granted

    scenario(tmp_path, run)


@pytest.mark.parametrize("wrong", ["generation", "slot", "key"])
def test_a_slot_is_written_as_it_was_granted_or_nothing_of_the_message_is_taken(tmp_path: Path, wrong: str) -> None:
    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        session.stores.top_up()
        await eventually(lambda: len(peer.credits) == 1)
        (ref,) = peer.credits
        key = chunk_key(0)[:-4] + b"\0\0\0\7" if wrong == "key" else chunk_key(0)
        other = {"generation": SlotRef(ref.slot, ref.generation + 1), "slot": SlotRef(ref.slot + 1, ref.generation)}
        with pytest.raises(InvalidArgumentError, match=r"store slot|store_begin\.key"):
            session.stores.begin([(key, other.get(wrong, ref))])
        assert session.stores.is_writing is False
        session.stores.begin([(chunk_key(0), ref)])
        assert session.stores.is_writing is True
        with pytest.raises(InvalidArgumentError, match="was not granted"):
            session.stores.begin([(chunk_key(0), ref)])

    scenario(tmp_path, run)


def test_only_its_own_key_ends_a_store(tmp_path: Path) -> None:
    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        session.stores.top_up()
        await eventually(lambda: len(peer.credits) == 1)
        ref = peer.credits.pop()
        session.stores.begin([(chunk_key(0), ref)])
        session.stores.abort([(chunk_key(1), ref)])
        session.stores.done([(chunk_key(1), ref)])
        assert session.stores.is_writing is True
        assert r.counters.stores_discarded_aborted == 0
        session.stores.abort([(chunk_key(0), ref)])
        assert session.stores.is_writing is False
        assert r.counters.stores_discarded_aborted == 1
        assert r.counters.stores_discarded_stamp == 0

    scenario(tmp_path, run)


def test_a_store_without_stamps_is_counted_and_frees_its_slot(tmp_path: Path) -> None:
    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        r.table.pin([chunk_key(0)])
        session.stores.top_up()
        await eventually(lambda: len(peer.credits) == 1)
        ref = peer.credits.pop()
        session.stores.begin([(chunk_key(0), ref)])
        session.stores.done([(chunk_key(0), ref)])
        assert session.stores.is_writing is False, "a worker thread has it now"
        await at_rest(r.resources)
        assert (r.counters.stores_discarded_stamp, r.counters.stored_chunks, r.counters.stored_bytes) == (1, 0, 0)
        assert peer.held[chunk_key(0)] is False
        assert not r.namespace.host.matches(ref, SlotState.SEALING)

    scenario(tmp_path, run)


def test_the_quarantine_of_a_lost_session_counts_credits_and_stores(tmp_path: Path) -> None:
    async def run(r: Rig, session: Session, peer: WatchedPeer) -> None:
        session.stores.top_up()
        await eventually(lambda: len(peer.credits) == 2)
        session.stores.begin([(chunk_key(0), peer.credits.pop())])
        await eventually(lambda: session.stores.num_grants == 3)
        session.lost()
        session.lost()
        assert r.counters.slots_quarantined == 3
        assert r.namespace.host.counts()[SlotState.QUARANTINED] == 3
        await session.wait_until_released()
        assert not r.namespace.host.counts()[SlotState.QUARANTINED]
        assert session.loads.num_acquires == 0

    scenario(tmp_path, run, store_credits=2, host_bytes=host_bytes_for(12))
