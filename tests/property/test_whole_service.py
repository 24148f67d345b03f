"""The whole service against what was promised: sessions, arenas, packs and ledger are real, gRPC and vLLM are left out.

Calls of disk and ledger may be held at any step while others act, or refused; the daemon may be stopped, or die at any
moment with what the kernel has. `KVTIER_CHAOS_EXAMPLES` makes the run long.
"""

import copy
import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import kvtier.upkeep.preallocation
from kvtier.config import DaemonConfig
from kvtier.config.model import StoreMode
from kvtier.core.fingerprint import namespace_id
from kvtier.core.layout import ChunkKey, GroupLayout, KVLayout
from kvtier.core.slots import SlotState
from kvtier.disk.base import StoredChunk
from kvtier.prompts.book import RequestedPin
from kvtier.prompts.states.status import durability_of
from kvtier.sessions.engine_peer import EngineHello
from kvtier.tiering.command_eviction import EvictTier
from kvtier.tiering.namespace import Namespace
from tests.fakes.fsck import assert_clean, check
from tests.fakes.gated_stores import STEPS
from tests.fakes.in_process_engine import InProcessEngine
from tests.fakes.living_service import LivingService
from tests.fakes.rig import at_once, eventually
from tests.fakes.scripted_engine import ONE_GROUP, chunk_key, config_in, host_bytes_for
from tests.fault.chaos_model import SPACES, Model, Prompt

NUM_EXAMPLES = int(os.environ.get("KVTIER_CHAOS_EXAMPLES", "0"))
"""0: few, and always the same."""
ROW_BYTES = 8192
HOST_ROWS = 14
PREALLOCATED_ROWS = 2
DISK_BYTES = 140_000
MAX_ENGINES = 4
TWO_GROUPS = KVLayout(
    num_ranks=2,
    rank_bytes=ROW_BYTES // 2,
    num_writers=2,
    groups=(
        GroupLayout(group_idx=0, chunk_tokens=16, useful_bytes=3000),
        GroupLayout(group_idx=1, chunk_tokens=16, useful_bytes=1500, window_chunks=2),
    ),
)
LAYOUTS = (ONE_GROUP, TWO_GROUPS)
KEYS = (
    [chunk_key(number) for number in range(8)],
    [chunk_key(number, number % 2) for number in range(8)],
)
"""By space."""
EPHEMERAL = len(SPACES)
"""An engine of the first space whose namespace ends with it."""
NAMES = ("p0", "p1", "p2", "p3")
ALL = "*"
numbers = st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=True)
choices = st.integers(0, 1000)
spaces = st.sampled_from(range(len(SPACES)))


class WholeServiceMachine(RuleBasedStateMachine):
    """The model is what was promised (`Model`); what was asked for and not answered may have happened or not."""

    @initialize(
        store=st.sampled_from(["pinned", "all"]),
        prefetch=st.booleans(),
        keep_arena=st.booleans(),
        may_damage=st.sampled_from([False, False, True]),
        max_arenas=st.sampled_from([1, 2, 100]),
    )
    def start(self, store: StoreMode, prefetch: bool, keep_arena: bool, may_damage: bool, max_arenas: int) -> None:
        def config(folder: Path) -> DaemonConfig:
            return config_of(folder, store, prefetch=prefetch, keep_arena=keep_arena)

        self.model = Model(Random(0))
        self.keep_arena, self.may_damage, self.was_damaged = keep_arena, may_damage, False
        self.num_refusals = 0  # of this daemon's writes
        self.service = LivingService(config, max_arenas)

    def teardown(self) -> None:
        if not hasattr(self, "service"):
            return
        try:
            self.service.be_calm()
            self.load_everything()
            self.stop()
            if self.was_damaged:
                check(self.service.config.disk.disk_dir, repair=True)
            assert_clean(self.service.config.disk.disk_dir)
        finally:
            self.service.close()

    # Operators

    def is_busy(self, name: str) -> bool:
        """Something is done with a prompt, or with a version of it."""
        doing = self.service.doing.values()
        return name.partition("@")[0] in doing or ALL in doing

    def follow_names(self) -> None:
        """A replacement takes the name of its pin, which becomes a version; versions may be forgotten."""
        prompts, book = self.model.prompts, self.service.cache.prompts
        for name, prompt in list(prompts.items()):
            row = book.by_pin_id(prompt.pin_id or "")
            if row is None and "@" in name:
                del prompts[name]
            elif row is not None and row.name != name:
                if prompts[name] is prompt:
                    del prompts[name]
                prompt.name, prompts[row.name] = row.name, prompt

    @rule(name=st.sampled_from(NAMES), space=spaces, chosen=numbers, ttl_s=st.sampled_from([0, 0, 60]))
    def pin(self, name: str, space: int, chosen: list[int], ttl_s: int) -> None:
        if self.is_busy(name):
            return
        keys = tuple(KEYS[space][number] for number in chosen)
        first_token = 1000 * (1 + space) + sum(10**place * number for place, number in enumerate(chosen))
        prompts = self.model.prompts
        prompt, old = Prompt(name, space, keys, first_token), prompts.get(name)
        as_before = self.unprotect(old) if old is not None and not (old.keys == keys and old.pinned) else lambda: None

        async def pinned() -> None:
            request = RequestedPin(
                name=name, tokens=tuple(prompt.tokens), model=SPACES[space], ttl_s=ttl_s, replace=True
            )
            view = await self.service.cache.pins.pin(request)
            prompt.pin_id, prompt.pinned = view.prompt.pin_id, True
            if view.prompt.name != name:  # the old one stands until this one is durable
                as_before()
                prompt.name = view.prompt.name
                if (same := prompts.get(prompt.name)) is not None and same.pin_id == prompt.pin_id:
                    prompt.durable = same.durable
                prompts[prompt.name] = prompt
                return
            if old is not None and old.pin_id == prompt.pin_id:
                prompt.durable = old.durable and old.pinned is True
            prompts[name] = prompt

        self.service.do(pinned(), name, refused=as_before)

    @rule()
    def finish_replacements(self) -> None:
        if any(self.is_busy(name) for name in NAMES):
            return
        self.follow_names()
        cache, olds = (
            self.service.cache,
            [self.model.prompts.get(name) for name in self.service.cache.prompts.replacements],
        )
        pending = [(old, self.unprotect(old)) for old in olds if old is not None]

        async def looked() -> None:
            await cache.replacements.look()
            for old, as_before in pending:
                row = cache.prompts.by_pin_id(old.pin_id or "")
                if row is not None and row.pinned:
                    as_before()
                elif row is not None:
                    old.pinned = False

        self.service.do(looked(), ALL)

    def unprotect(self, prompt: Prompt) -> Callable[[], None]:
        """Somebody asks to end a promise, and what is not pinned may go; returns what to do when that is refused."""

        def refused(pinned: bool | None = prompt.pinned, durable: bool = prompt.durable) -> None:
            prompt.pinned, prompt.durable = pinned, durable

        prompt.pinned, prompt.durable = None, False
        return refused

    @rule(name=st.sampled_from(NAMES), space=spaces, chosen=numbers)
    def pin_and_store(self, name: str, space: int, chosen: list[int]) -> None:
        """All of it, as it mostly goes."""
        self.pin(name, space, chosen, 0)
        if not any(engine.space == space for engine in self.service.engines):
            self.attach(space, 2)
        for which, engine in enumerate(self.service.engines):
            if engine.space == space:
                self.bind(which, name)
        for which, engine in enumerate(self.service.engines):
            if engine.space == space:
                self.store(which, [number for number in chosen if engine.mirror.wants(KEYS[space][number])])
        self.finish_replacements()

    @rule(name=st.sampled_from(NAMES))
    def unpin(self, name: str) -> None:
        prompt = self.model.prompts.get(name)
        if prompt is None or self.is_busy(name):
            return
        as_before = self.unprotect(prompt)

        async def unpinned() -> None:
            await self.service.cache.pins.unpin(name)
            prompt.pinned = False

        self.service.do(unpinned(), name, refused=as_before)

    @rule(name=st.sampled_from(NAMES), force=st.booleans(), tier=st.sampled_from(EvictTier))
    def evict(self, name: str, force: bool, tier: EvictTier) -> None:
        prompt = self.model.prompts.get(name)
        if prompt is None or self.is_busy(name):
            return
        if tier is not EvictTier.HOST:
            self.model.evicted(prompt.places)
        prompt.removal_pending = prompt.removal_pending or (tier is EvictTier.ANY and not prompt.pinned)
        prompts = self.model.prompts

        async def evicted() -> None:
            await self.service.cache.evictions.evict(name, force=force, tier=tier)
            if tier is EvictTier.ANY and prompt.pinned is False:
                del prompts[name]

        self.service.do(evicted(), name, evicts=tier is not EvictTier.HOST)

    @rule(which=choices, chosen=numbers)
    def load_from_disk(self, which: int, chosen: list[int]) -> None:
        self.evict_all(True, EvictTier.HOST)
        self.acquire(which, chosen)

    @rule(force=st.booleans(), tier=st.sampled_from(EvictTier))
    def evict_all(self, force: bool, tier: EvictTier) -> None:
        if any(self.is_busy(name) for name in NAMES):
            return
        if tier is not EvictTier.HOST:
            for prompt in self.model.prompts.values():
                prompt.durable = prompt.durable and not force
                prompt.removal_pending = prompt.removal_pending or (tier is EvictTier.ANY and not prompt.pinned)
        prompts = self.model.prompts

        prompts = self.model.prompts

        async def evicted() -> None:
            await self.service.cache.evictions.evict_all(force=force, tier=tier)
            if tier is EvictTier.ANY:
                for prompt in [prompt for prompt in prompts.values() if prompt.pinned is False]:
                    del prompts[prompt.name]

        self.service.do(evicted(), ALL, evicts=tier is not EvictTier.HOST)

    @rule(seconds=st.sampled_from([1, 30, 100, 90_000]))
    def time_passes(self, seconds: int) -> None:
        self.service.clock.unix_s += seconds
        for prompt in self.service.cache.prompts.expired(self.service.clock.unix_s):
            if (known := self.model.prompts.get(prompt.name)) is not None:
                self.unprotect(known)
        self.service.do(self.service.cache.expiry.look(), ALL)

    @rule()
    def keep_capacity(self) -> None:
        self.service.do(self.service.cache._keep_capacity_once())

    @rule()
    def compact(self) -> None:
        compactor = self.service.cache.compactor

        async def compacted() -> None:
            for _ in range(20):
                if (job := await compactor.next_job()) is None or not await compactor.compact(job):
                    return

        self.service.do(compacted())

    @rule()
    def scrub(self) -> None:
        if "scrub" not in self.service.doing.values():
            self.service.do(self.service.cache.scrubber.scrub_pass(), "scrub")

    # Engines

    @rule(space=st.sampled_from([0, 0, 1, 1, EPHEMERAL]), num_credits=st.integers(1, 4))
    def attach(self, space: int, num_credits: int) -> None:
        if len(self.service.engines) >= MAX_ENGINES:
            return
        engine = InProcessEngine(hello_of(space, num_credits, self.service.num_lives), space)
        engines = self.service.engines

        async def attached() -> None:
            await engine.attach(self.service.cache)
            engines.append(engine)

        self.service.do(attached())

    def pick(self, which: int) -> InProcessEngine | None:
        """Return an engine, one that has just come if there was none; None while that is held up."""
        if not self.service.engines:
            self.attach(which % len(SPACES), 2)
        return self.service.engines[which % len(self.service.engines)] if self.service.engines else None

    @rule(which=choices, name=st.sampled_from(NAMES))
    def bind(self, which: int, name: str) -> None:
        engine, staged = self.pick(which), self.service.cache.prompts.replacements.get(name)
        prompt = self.model.prompts.get(name if staged is None else staged.name)
        if engine is None or prompt is None or self.is_busy(name):
            return
        row = self.service.cache.prompts.by_pin_id(prompt.pin_id or "")
        if row is not None and engine.session.serves(row):
            self.service.do(engine.bind(self.service.cache, row, prompt.keys), name)

    @rule(which=choices, chosen=numbers)
    def begin_store(self, which: int, chosen: list[int]) -> None:
        if (engine := self.pick(which)) is not None:
            self.service.sync(lambda: engine.begin_store(keys_of(engine, chosen)))

    @rule(which=choices, how=st.sampled_from(["well"] * 6 + ["abort", "unwritten", "other key", "one rank"]))
    def end_stores(self, which: int, how: str) -> None:
        if (engine := self.pick(which)) is None:
            return
        stores, engine.writing = engine.writing, []
        if how != "unwritten":
            for key, ref in stores:
                num_stamps = engine.layout.num_writers - 1 if how == "one rank" else None
                engine.write(key, ref, stamp=how != "other key", num_stamps=num_stamps)
        end = engine.session.stores.abort if how == "abort" else engine.session.stores.done
        self.service.sync(lambda: end(stores))

    @rule(which=choices, chosen=numbers)
    def store(self, which: int, chosen: list[int]) -> None:
        """All of it, as it mostly goes."""
        self.begin_store(which, chosen)
        self.end_stores(which, "well")

    @rule(which=choices, chosen=numbers)
    def abort(self, which: int, chosen: list[int]) -> None:
        """Resources that are open end without having been written."""
        self.begin_store(which, chosen)
        self.end_stores(which, "abort")

    @rule(which=choices, chosen=numbers)
    def acquire(self, which: int, chosen: list[int]) -> None:
        if (engine := self.pick(which)) is not None:
            self.service.do(engine.acquire(keys_of(engine, chosen)))

    @rule(which=choices, number=choices, indexes=st.none() | st.lists(st.integers(0, 4), unique=True))
    def release(self, which: int, number: int, indexes: list[int] | None) -> None:
        if (engine := self.pick(which)) is not None and engine.asked:
            acquire_id = sorted(engine.asked)[number % len(engine.asked)]
            self.service.sync(lambda: engine.release(acquire_id, indexes))

    @rule(which=choices, chosen=numbers, stored=st.booleans(), rate=st.sampled_from([10.0, 1e6]))
    def touch(self, which: int, chosen: list[int], stored: bool, rate: float) -> None:
        if (engine := self.pick(which)) is not None:
            engine.session.measured(rate)
            self.service.sync(lambda: at_once(engine.session.stores.touch(keys_of(engine, chosen), stored=stored)))

    @rule(which=choices, processes_end=st.booleans())
    def detach(self, which: int, processes_end: bool) -> None:
        if (engine := self.pick(which)) is None:
            return
        self.service.engines.remove(engine)
        if not processes_end:
            self.service.orphans.append(engine)

        def ended() -> None:
            self.service.cache.end(engine.session)
            if processes_end:
                engine.end_processes()

        self.service.sync(ended)

    @rule(which=choices)
    def end_processes(self, which: int) -> None:
        if self.service.orphans:
            self.service.orphans.pop(which % len(self.service.orphans)).end_processes()
            self.service.go_on()

    @rule(which=choices, is_good=st.booleans())
    def write_late(self, which: int, is_good: bool) -> None:
        """A process of a lost engine goes on with what it was doing."""
        if not self.service.orphans:
            return
        engine = self.service.orphans[which % len(self.service.orphans)]
        for key, ref in [*engine.writing, *((KEYS[0][0], ref) for ref in engine.credits if engine.layout is ONE_GROUP)]:
            engine.write(key, ref, stamp=is_good)

    # Disk and ledger

    @rule(step=st.sampled_from([*STEPS, "read", "read"]))
    def hold(self, step: str) -> None:
        self.service.faults.held.add(step)

    @rule(kind=st.sampled_from(["read", "write", "ledger"]), number=st.sampled_from([errno.EIO, errno.ENOSPC]))
    def refuse(self, kind: str, number: int) -> None:
        self.service.faults.refused[kind] = number
        self.num_refusals += kind == "write"

    @rule()
    def calm(self) -> None:
        self.service.be_calm()

    @rule(step=st.sampled_from(STEPS))
    def let_pass(self, step: str) -> None:
        self.service.faults.let_pass(step)
        self.service.go_on()

    @rule(which=choices, how=st.sampled_from(["flip", "cut", "remove"]), where=choices)
    def damage(self, which: int, how: str, where: int) -> None:
        packs = sorted((self.service.config.disk.disk_dir / "packs").glob("*.kvpack"))
        if not packs or not self.may_damage:
            return
        self.was_damaged = True
        pack = packs[which % len(packs)]
        for prompt in self.model.prompts.values():  # compaction may be copying it
            prompt.durable = False
        match how:
            case "flip":
                data = bytearray(pack.read_bytes())
                data[(where * 37) % len(data)] ^= 4
                pack.write_bytes(data)
            case "cut":
                os.truncate(pack, where * pack.stat().st_size // 1001)
            case _:
                pack.unlink()

    # Ends

    @rule(how=st.sampled_from(["stop", "kill", "kill the engines too"]))
    def end(self, how: str) -> None:
        if how == "stop":
            self.stop()
            self.service.open(self.service.config)
        else:
            self.model = copy.deepcopy(self.model)  # what is acknowledged from now on reaches no one
            self.service.die(processes_end=how != "kill")
        self.num_refusals = 0
        self.keep_promises()

    def stop(self) -> None:
        self.service.stop()
        files = sorted(path.name for path in self.service.config.host.arena_dir.iterdir())
        assert self.keep_arena or not files, files

    # What must be true

    def note_durable(self) -> None:
        """Take in what the daemon says is durable."""
        if self.service.num_evicting or self.was_damaged:
            return
        for prompt in list(self.model.prompts.values()):
            self.learn(prompt)
            if (
                prompt.pinned
                and not prompt.removal_pending
                and not self.is_busy(prompt.name)
                and self.is_durable(prompt)
            ):
                prompt.durable = True

    def learn(self, prompt: Prompt) -> None:
        """Take over what became of changes that were asked for, and have ended."""
        if self.is_busy(prompt.name) or not (prompt.removal_pending or prompt.pinned is None):
            return
        row = {prompt.name: prompt for prompt in self.service.cache.prompts}.get(prompt.name)
        if row is None or row.pin_id != prompt.pin_id:
            assert prompt.removal_pending
            del self.model.prompts[prompt.name]
        else:
            prompt.removal_pending, prompt.pinned = False, row.pinned

    def is_durable(self, prompt: Prompt) -> bool:
        space_id = namespace_id(fingerprint_of(prompt.space))
        cache = self.service.cache
        row = cache.prompts.binding(prompt.pin_id or "", space_id)
        return row is not None and durability_of(cache.namespaces[space_id], row).durable

    def keep_promises(self) -> None:
        """A start: compare what it found with what was promised, and learn what had been asked for."""
        self.follow_names()
        found = {prompt.name: prompt for prompt in self.service.cache.prompts}
        self.model.prompts = {
            name: p for name, p in self.model.prompts.items() if not p.removal_pending or name in found
        }
        for prompt in self.model.prompts.values():
            prompt.removal_pending = False
            row = found[prompt.name]
            if prompt.pinned is None:
                prompt.pin_id, prompt.pinned = row.pin_id, row.pinned
            assert (row.pin_id, row.pinned) == (prompt.pin_id, prompt.pinned), prompt
        for row in found.values():
            self.take_over(row.name)

    def take_over(self, name: str) -> None:
        """A pin that was asked for when the daemon ended."""
        row = self.service.cache.prompts.get(name)
        known = self.model.prompts.get(name)
        if known is not None and tuple(known.tokens) == row.tokens:
            return
        space = SPACES.index(row.model)
        keys = [binding.keys for binding in self.service.cache.prompts.bindings_of(row.pin_id)]
        prompt = Prompt(name, space, tuple(keys[0] if keys else KEYS[space][:1]), row.tokens[0])
        prompt.pin_id, prompt.pinned = row.pin_id, row.pinned
        self.model.prompts[name] = prompt

    @invariant()
    def nothing_failed_unseen(self) -> None:
        if hasattr(self, "service") and (found := self.service.problems.found):
            raise AssertionError(found) from next((error for error in found if isinstance(error, Exception)), None)

    @invariant()
    def promises_stand(self) -> None:
        if not hasattr(self, "service"):
            return
        if not self.service.doing:
            self.follow_names()
        for prompt in self.model.prompts.values():
            if prompt.pinned and not self.is_busy(prompt.name):
                row = self.service.cache.prompts.get(prompt.name)
                assert (row.pin_id, row.pinned) == (prompt.pin_id, True)
            # While something else is done names are not followed: a version may have been forgotten meanwhile.
            is_there = self.service.cache.prompts.by_pin_id(prompt.pin_id or "") is not None
            if prompt.durable and (is_there or "@" not in prompt.name):
                assert self.is_durable(prompt), prompt
        self.note_durable()

    @invariant()
    def bytes_are_right(self) -> None:
        if hasattr(self, "service"):
            for engine in [*self.service.engines, *self.service.orphans]:
                engine.check()

    @invariant()
    def slots_are_conserved(self) -> None:
        if not hasattr(self, "service"):
            return
        stores = self.service.cache.resources
        for namespace in self.service.cache.namespaces.values():
            namespace.host.check()
        if not self.service.faults.is_calm:
            return
        self.service.go_on()  # what its clocks have begun since the last rule, on a busy machine, ends too
        assert self.service.is_quiet()
        for namespace in self.service.cache.namespaces.values():
            namespace.table.check()
            self.check_slots(namespace)
        used_bytes = sum(namespace.host.usage.held_bytes for namespace in self.service.cache.namespaces.values())
        assert stores.budget.used_bytes == used_bytes
        if self.service.num_lives == 1:  # the copy that the next daemon finds has pages everywhere
            assert used_bytes == self.shared_bytes()
        assert self.service.orphans or used_bytes <= stores.budget.limit_bytes
        assert not stores.request_reads.busy
        self.check_quota_sums()
        assert stores.counters.write_back_queue_bytes == 0

    def shared_bytes(self) -> int:
        """Memory that the files of the arena folder take."""
        return sum(path.stat().st_blocks * 512 for path in self.service.config.host.arena_dir.iterdir())

    def check_quota_sums(self) -> None:
        """What is added up as it changes is what a walk over all pins finds."""
        book = self.service.cache.prompts
        book.check()
        for namespace in self.service.cache.namespaces.values():
            table, num_bytes = namespace.table, 0
            for prompt in book.pinned():
                row = book.binding(prompt.pin_id, namespace.namespace_id)
                for key in row.keys if row is not None else ():
                    chunk = table.get(key)
                    assert chunk is not None
                    stored = chunk.location
                    num_bytes += namespace.tiers.payload_bytes(key) if stored is None else stored.stored_bytes
            assert table.disk.promised_bytes == num_bytes

    def check_slots(self, namespace: Namespace) -> None:
        sessions = [each for each in self.service.cache.sessions if each.namespace_id == namespace.namespace_id]
        counts = namespace.host.counts()
        live = [session for session in sessions if not session.ended]
        assert counts[SlotState.GRANTED] == sum(session.stores.num_grants for session in live)
        ended = sum(session.stores.num_grants for session in sessions if session.ended)
        assert counts[SlotState.QUARANTINED] == ended
        assert namespace.host.recovering or not counts[SlotState.ORPHAN]
        assert counts[SlotState.SEALING] == counts[SlotState.LOADING] == counts[SlotState.BACKING] == 0
        assert sum(chunk.num_leases for chunk in namespace.table) == sum(
            session.loads.num_leases for session in sessions
        )
        assert self.service.orphans or not any(session.ended for session in sessions)

    @invariant()
    def engines_know_what_is_true(self) -> None:
        if not hasattr(self, "service") or not self.service.faults.is_calm:
            return
        for engine in self.service.engines:
            table = engine.namespace.table
            bound = [row.pin_id for row in self.service.cache.prompts if row.pin_id in engine.session.bound]
            known = {key for pin_id in bound for key in engine.mirror._pins[pin_id].keys}
            if engine.mirror.stores_all:
                known |= set(table.keys()) | engine.mirror._held
            wrong = [(key, table.get(key)) for key in known if engine.mirror.may_be_held(key) != table.holds(key)]
            assert not wrong
            assert len(engine.credits) + len(engine.writing) == engine.session.stores.num_grants
            leased = sum(len(asked.readable) for asked in engine.asked.values())
            assert leased == engine.session.loads.num_leases
            prompts = [row for row in self.service.cache.prompts if engine.session.serves(row)]
            assert engine.pinned == {row.pin_id: row.pinned for row in prompts}
            assert not any(asked.promoting for asked in engine.asked.values()), "never answered"

    @invariant()
    def the_disk_is_counted(self) -> None:
        if not hasattr(self, "service") or not self.service.faults.is_calm:
            return
        stores = self.service.cache.resources
        assert stores.disk_usage.promised_bytes == 0
        if self.was_damaged:
            return
        # A worker thread's last call may have ended before the loop knows: what is wrong for good stays wrong.
        with suppress(TimeoutError):
            self.service.run(eventually(lambda: self._pack_files() == dict(stores.disk_usage.packs)))
            self.service.run(eventually(lambda: self._places() == self._rows()))
        files, rows = self._pack_files(), self._rows()
        assert dict(stores.disk_usage.packs) == files
        assert stores.disk_usage.used_bytes == sum(files.values()) <= DISK_BYTES
        assert self._places() == rows
        orphans = set(files) - {chunk.pack_id for chunk in rows.values()}
        assert not orphans or self.num_refusals, "only what could not be unlinked stays, for the next start"
        assert stores.counters.damaged_chunks_disk == 0

    def _pack_files(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for path in (self.service.config.disk.disk_dir / "packs").iterdir():
            with suppress(FileNotFoundError):  # a worker thread has just unlinked it
                sizes[path.stem] = path.stat().st_size
        return sizes

    def _rows(self) -> dict[tuple[str, ChunkKey], StoredChunk]:
        """Return what the ledger says of every chunk."""
        records = self.service.cache.resources.ledger.load().packs.values()
        return {(record.namespace_id, chunk.key): chunk for record in records for chunk in record.chunks}

    def _places(self) -> dict[tuple[str, ChunkKey], StoredChunk]:
        """Return what memory says of them."""
        return {
            (namespace.namespace_id, chunk.key): chunk.location
            for namespace in self.service.cache.namespaces.values()
            for chunk in namespace.table
            if chunk.location is not None
        }

    def load_everything(self) -> None:
        """Every chunk of every prompt that is durable can be had."""
        while self.service.engines:
            self.detach(0, True)
        while self.service.orphans:
            self.end_processes(0)
        self.service.cache.arenas.max_open = len(SPACES)
        for space in range(len(SPACES)):
            self.attach(space, 1)
        for prompt in [prompt for prompt in self.model.prompts.values() if prompt.durable]:
            engine = self.service.engines[prompt.space]
            for key in prompt.keys:
                self.load(engine, key)
        self.nothing_failed_unseen()

    def load(self, engine: InProcessEngine, key: ChunkKey) -> None:
        num_read = engine.num_read
        self.service.do(engine.acquire([key]))
        assert engine.num_read == num_read + 1
        self.service.sync(lambda: engine.release(max(engine.asked), None))


def fingerprint_of(space: int) -> dict[str, str]:
    return {"weights": str(space)}


def config_of(folder: Path, store: StoreMode, *, prefetch: bool, keep_arena: bool) -> DaemonConfig:
    config = config_in(
        folder,
        host_bytes=host_bytes_for(HOST_ROWS, num_arenas=3),
        disk_bytes=DISK_BYTES,
        store=store,
        compact_bytes_per_s=0,
        scrub_bytes_per_s=0,
        compact_dead_ratio=0.05,
        pack_bytes=4 * ROW_BYTES,
    )
    return replace(
        config,
        server=replace(config.server, drain_timeout_s=0.2),
        host=replace(
            config.host, preallocated_bytes=PREALLOCATED_ROWS * ROW_BYTES, prefetch=prefetch, keep_arena=keep_arena
        ),
        disk=replace(config.disk, pack_linger_s=0.001),
    )


def hello_of(space: int, num_credits: int, life: int) -> EngineHello:
    is_ephemeral = space == EPHEMERAL
    return EngineHello(
        engine_id="engine",
        pid=1,
        vllm_version="0",
        model_names=(SPACES[space % len(SPACES)],),
        fingerprint=fingerprint_of(space) | ({"life": str(life)} if is_ephemeral else {}),
        layout=LAYOUTS[space % len(SPACES)],
        store_credits=num_credits,
        ephemeral=is_ephemeral,
    )


def keys_of(engine: InProcessEngine, chosen: Sequence[int]) -> list[ChunkKey]:
    keys = KEYS[LAYOUTS.index(engine.layout)]
    return [keys[number] for number in chosen]


@pytest.fixture(autouse=True)
def preallocated_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made at once."""
    monkeypatch.setattr(kvtier.upkeep.preallocation, "LOOK_S", 0.002)


TestWholeService = pytest.mark.timeout(120 + 3 * NUM_EXAMPLES)(WholeServiceMachine.TestCase)
TestWholeService.settings = settings(
    max_examples=NUM_EXAMPLES or 25,
    stateful_step_count=40,
    deadline=None,
    derandomize=not NUM_EXAMPLES,
    suppress_health_check=list(HealthCheck),
)
