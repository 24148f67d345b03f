"""Preemptions that random lifecycles hardly find, each led to where it was wrong."""

import pytest

from kvtier._pb import engine_pb2 as pb
from tests.simulation.engine import BLOCK_TOKENS, SimulatedEngine
from tests.simulation.test_lifecycles import FULL, PREFIXES

PINNED = PREFIXES[3]  # four blocks, which are as many tokens as a step may have


def engine_with_pin(num_blocks: int, *, is_async: bool = False, kv_role: str = "kv_both") -> SimulatedEngine:
    """Return an engine whose daemon answers at once, and has one pin."""
    engine = SimulatedEngine((FULL,), num_blocks=num_blocks, num_slots=24, is_async=is_async, kv_role=kv_role)
    engine.answers_at_once = True
    engine.attach()
    pin = pb.Pin(pin_id="p", name="p", tokens=PINNED, pinned=True)
    engine.daemon.pins[pin.pin_id] = pin
    engine.link.bind(pin)
    return engine


def run(engine: SimulatedEngine, num_steps: int) -> None:
    for _ in range(num_steps):
        engine.step(num_copies=3)
        engine.answer_probe()


def test_a_reset_with_running_requests_loads_them_again_in_the_next_step() -> None:
    """vLLM before 0.33 asserts that what a step preempted has no load, and the engine ended."""
    engine = engine_with_pin(16)
    engine.add("first", [*PINNED, 1], max_tokens=1)
    run(engine, 20)
    assert engine.daemon.num_stored == len(PINNED) // BLOCK_TOKENS
    engine.reset(running=False, connector=False)
    engine.add("r", [*PINNED, 2], max_tokens=100)
    run(engine, 10)
    num_loaded = engine.copier.num_loaded
    assert num_loaded
    assert engine.reset(running=True, connector=False)
    run(engine, 20)
    assert engine.copier.num_loaded == 2 * num_loaded
    run(engine, 100)
    assert engine.num_received["r"] == 100


@pytest.mark.parametrize("num_before", range(BLOCK_TOKENS))
def test_blocks_that_were_taken_from_a_request_are_not_stored_as_its_own(num_before: int) -> None:
    """A prefill engine takes blocks from a request whose last step is on its way; its output then ends it.

    Its last chunk was stored from a block into which another request had written.
    """
    num_blocks = 1 + 2 + len(PINNED) // BLOCK_TOKENS  # the null block, two for the one that decodes, and no more
    engine = engine_with_pin(num_blocks, is_async=True, kv_role="kv_producer")
    engine.add("decodes", range(500, 500 + BLOCK_TOKENS + num_before), max_tokens=3 * BLOCK_TOKENS)
    run(engine, 2)
    engine.add("pinned", PINNED, max_tokens=1)
    slots, withheld = engine.manager.stores._credits, list[list[pb.SlotRef]]()
    while not engine.num_received["pinned"] and len(withheld) < 40:
        withheld.append(list(slots))
        slots.clear()  # no chunk gets one before the request has ended
        run(engine, 1)
    for each in withheld:
        slots.extend(each)
    run(engine, 200)  # `SimulatedEngine` checks every chunk that is stored
    assert not engine.unfinished


def test_after_a_reset_that_failed_nothing_of_before_is_stored() -> None:
    """vLLM resets its connector though requests run, and keeps its own index: others hit that, and offered what it has
    to the next session, whose namespace is for what the weights are now."""
    engine = engine_with_pin(24)
    engine.add("runs", [*PINNED, 1], max_tokens=60)
    run(engine, 10)
    assert engine.daemon.num_stored == len(PINNED) // BLOCK_TOKENS
    assert not engine.reset(running=False, connector=True)
    engine.attach()
    for pin in engine.daemon.pins.values():
        engine.link.bind(pin)
    before = engine.daemon.num_stored
    engine.add("later", [*PINNED, 2], max_tokens=1)
    run(engine, 20)
    assert engine.num_received["later"] == 1
    assert engine.daemon.num_stored == before
    run(engine, 80)
    assert engine.num_received["runs"] == 60
    assert engine.reset(running=False, connector=True)
    engine.attach()
    for pin in engine.daemon.pins.values():
        engine.link.bind(pin)
    engine.add("last", [*PINNED, 3], max_tokens=1)
    run(engine, 20)
    assert engine.daemon.num_stored > before
