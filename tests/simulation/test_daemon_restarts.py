"""The daemon restarts while requests wait: vLLM's real scheduler restores them, as if they had come later."""

import pytest

from tests.simulation.test_admission import MAX_STEPS, NUM_BLOCKS, A, B, Engine, b_waits

MAX_RUNNING = 4


def restart(engine: Engine) -> None:
    """The daemon is gone and back between two steps."""
    engine.daemon.lose_session()
    engine.daemon.sweep()
    engine.attach()
    for pin in engine.daemon.pins.values():
        engine.link.bind(pin)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("admission", ["fcfs", "prefix_first"])
def test_a_request_that_waits_for_blocks_is_restored(is_async: bool, admission: str) -> None:
    engine = b_waits(Engine(is_async=is_async, admission=admission))
    assert "b" not in engine.admitted
    restart(engine)
    engine.run()
    assert engine.computed["b"] == 1, "only the question is computed"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_that_was_asked_for_and_waits_for_its_turn_is_restored(is_async: bool) -> None:
    """vLLM looks at it when another has ended; the daemon goes before it answers."""
    engine = Engine(is_async=is_async, num_blocks=3 * NUM_BLOCKS)
    for number in range(MAX_RUNNING):
        engine.ask(f"a{number}", A, max_tokens=4 + number)
        engine.steps_until(f"a{number}")
    engine.ask("b", B)
    for _ in range(MAX_STEPS):
        if engine.daemon.acquires:
            break
        engine.step()
    assert "b" not in engine.admitted
    restart(engine)
    engine.run()
    assert engine.computed["b"] == 1, "only the question is computed"
