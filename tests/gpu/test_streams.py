"""Many jobs at once beside a model that computes, while slots are given out again and rows get other pages."""

import random
import threading
from functools import partial

from tests.fakes.waiting import wait_for
from tests.gpu.conftest import MakeRig
from tests.gpu.rig import Rig

ROUNDS = 40


def test_a_store_waits_for_the_model_and_the_model_for_a_load(make_rig: MakeRig) -> None:
    """Without the first, a store takes what was in the blocks before the step."""
    rig = make_rig(blocks_per_chunk=1)
    rig.lock_all()
    rng = random.Random(1)
    for _ in range(ROUNDS):
        source = [(slot, 0, ids) for slot, ids in zip((1, 2, 3), rig.distinct_blocks(rng, 3), strict=True)]
        rig.scramble([block for _, _, ids in source for block in ids], is_late=True)
        stored = rig.store(source)
        rig.assert_busy()
        rig.finish(stored)
        expected = [rig.on_device(group, ids) for _, group, ids in source]
        assert [rig.in_arena(slot, group) for slot, group, _ in source] == expected
        target = [(slot, 0, ids) for (slot, _, _), ids in zip(source, rig.distinct_blocks(rng, 3), strict=True)]
        rig.scramble(range(rig.num_blocks), is_late=True)  # still to come when the load is submitted: not to undo it
        loaded = rig.load(target)
        rig.assert_busy()
        assert rig.finish(loaded) == set()
        assert [rig.on_device(group, ids) for _, group, ids in target] == expected


def test_a_load_does_not_wait_for_the_model_of_its_own_step(make_rig: MakeRig) -> None:
    """Model Runner V2 submits loads after the model; they would take as long as the step, whatever their size."""
    rig = make_rig(blocks_per_chunk=1)
    rig.lock_all()
    rng = random.Random(5)
    rig.finish(rig.store([(1, 0, [1])]))
    expected = rig.in_arena(1, 0)
    for _ in range(ROUNDS):
        (ids,) = rig.distinct_blocks(rng, 1)
        rig.scramble(ids)
        rig.worker.step_begins(has_loads=True)
        rig.keep_busy()
        assert rig.finish(rig.load([(1, 0, ids)])) == set()
        rig.assert_busy()
        assert rig.on_device(0, ids) == expected


def test_slots_given_out_again_under_open_jobs_are_never_taken_for_what_they_were(make_rig: MakeRig) -> None:
    """The daemon does not do this while leases and locks hold; generations are the second guard."""
    rig = make_rig(blocks_per_chunk=2, num_blocks=128)
    rig.lock_all()
    rng = random.Random(2)
    num_failed = 0
    for _ in range(ROUNDS):
        slots = rng.sample(range(rig.num_slots), 8)
        source = [(slot, 0, ids) for slot, ids in zip(slots, rig.distinct_blocks(rng, 8), strict=True)]
        rig.finish(rig.store(source))
        expected = {slot: rig.in_arena(slot, 0) for slot in slots}
        victims = rng.sample(slots, 2)
        targets = [(slot, 0, ids) for slot, ids in zip(slots, rig.distinct_blocks(rng, 8), strict=True)]
        jobs = {rig.load([target]): target for target in targets}

        def take_away(victims: list[int] = victims) -> None:
            for slot in victims:
                rig.arena.set_generation(slot, rig.arena.generation(slot) + 1)

        thief = threading.Thread(target=take_away)
        thief.start()
        failed = rig.finish(*jobs)
        thief.join()
        num_failed += len(failed)
        for job, (slot, group, ids) in jobs.items():
            assert f"r{job}" in failed or rig.on_device(group, ids) == expected[slot]
            assert f"r{job}" not in failed or slot in victims
    print(f"{num_failed} of {2 * ROUNDS} slots were lost in time to be noticed")
    assert num_failed, "the loads met slots that were given out again"


def test_a_row_that_got_other_pages_holds_what_is_stored_next(make_rig: MakeRig) -> None:
    """A device goes on to write into pages that it locked; the daemon would read zeros, and give them a checksum."""
    rig = make_rig(blocks_per_chunk=1)
    rig.lock_all()
    rng = random.Random(3)
    for _ in range(ROUNDS):
        slots = rng.sample(range(rig.num_slots), 6)
        rig.arena.unback(slots)
        rig.arena.back(slots)
        source = [(slot, 0, ids) for slot, ids in zip(slots, rig.distinct_blocks(rng, 6), strict=True)]
        expected = [rig.on_device(group, ids) for _, group, ids in source]
        wait_for(partial(_is_stored, rig, source))
        assert [rig.in_arena(slot, group) for slot, group, _ in source] == expected


def _is_stored(rig: Rig, source: list[tuple[int, int, list[int]]]) -> bool:
    """Store; a worker refuses, whole, as long as a row is locked with the pages that it had."""
    rig.finish(rig.store(source))
    stamped = {rig.is_stored(slot, group) for slot, group, _ in source}
    if stamped != {True}:
        assert stamped == {False}
        assert not any(any(rig.in_arena(slot, group)) for slot, group, _ in source), "refused, and yet written"
    return stamped == {True}


def test_rows_without_pages_are_unlocked(make_rig: MakeRig) -> None:
    """Else the memory that the daemon frees for others stays the device's."""
    rig = make_rig()
    rig.lock_all()
    rig.arena.unback(range(1, rig.num_slots))
    wait_for(lambda: rig.worker._arena is not None and rig.worker._arena.num_locked == 1, 60)


def test_both_directions_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(blocks_per_chunk=1, num_blocks=128)
    rig.lock_all()
    rng = random.Random(4)
    rig.finish(rig.store([(slot, 0, [slot]) for slot in range(8)]))
    kept = {slot: rig.in_arena(slot, 0) for slot in range(8)}
    for _ in range(ROUNDS):
        drawn = rig.distinct_blocks(rng, 24)
        rig.scramble([block for ids in drawn[:16] for block in ids], is_late=True)
        stores = [rig.store([(8 + number, 0, ids)]) for number, ids in enumerate(drawn[:16])]
        loads = [rig.load([(slot, 0, ids)]) for slot, ids in enumerate(drawn[16:])]
        rig.assert_busy()
        assert rig.finish(*stores, *loads) == set()
        for slot, ids in enumerate(drawn[16:]):
            assert rig.on_device(0, ids) == kept[slot]
        for number, ids in enumerate(drawn[:16]):
            assert rig.is_stored(8 + number, 0)
            assert rig.in_arena(8 + number, 0) == rig.on_device(0, ids)
