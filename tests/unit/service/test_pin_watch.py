"""What is known of pins without counting their chunks, with a clock of the test's own."""

import asyncio

from kvtier.ledger import PromptRow
from kvtier.obs.histogram import Histogram
from kvtier.prompts.book import PromptBook, RequestedPin
from kvtier.prompts.states.pin_watch import PinWatch
from kvtier.prompts.states.status import PromptState

CAPTURING, DURABLE, WAITING = PromptState.CAPTURING, PromptState.DURABLE, PromptState.WAITING


class Pins:
    """A book of prompts whose states the test sets, and a watch on it.

    Attributes:
        looks: Prompts looked at, in order.
    """

    def __init__(self) -> None:
        self.book, self.states, self.now_s = PromptBook(), dict[str, PromptState](), 100.0
        self.looks: list[str] = []
        self.durable = Histogram((1.0, 10.0, 100.0))
        self.watch = PinWatch(self.book, self._state_of, self.durable, now_s=lambda: self.now_s, sleep=_next_turn)

    def _state_of(self, prompt: PromptRow) -> PromptState:
        self.looks.append(prompt.name)
        return self.states[prompt.name]

    def put(self, name: str, state: PromptState) -> str:
        """Keep a pinned prompt, as a daemon that begins does; return its id."""
        prompt, _ = self.book.draft(RequestedPin(name=name, tokens=(1, 2)), 0.0)
        self.book.put(prompt)
        self.states[name] = state
        return prompt.pin_id

    def pin(self, name: str, state: PromptState = WAITING) -> None:
        """Pin a prompt now."""
        self.watch.pinned(self.put(name, state))

    def counts(self) -> dict[PromptState, int]:
        """Return how many pinned prompts are in each state."""
        return {state: standing.num_pins for state, standing in self.watch.standing().items() if standing.num_pins}

    def look(self, after_s: float = 0.0) -> None:
        """Let time go by, and have the watch look."""
        self.now_s += after_s
        asyncio.run(self.watch.look())


async def _next_turn(_: float) -> None:
    await asyncio.sleep(0)


def test_the_time_from_a_pin_to_its_durability_is_observed_once() -> None:
    pins = Pins()
    pins.pin("p", CAPTURING)
    pins.look(5)
    assert pins.counts() == {CAPTURING: 1}
    assert pins.watch.standing()[CAPTURING].oldest_wait_s == 5
    pins.states["p"] = DURABLE
    pins.look(3)
    pins.look(50)
    assert (pins.durable.count, pins.durable.total) == (1, 8)
    assert pins.counts() == {DURABLE: 1}
    assert pins.watch.standing()[CAPTURING].oldest_wait_s == 0


def test_a_daemon_that_begins_with_durable_pins_observes_nothing() -> None:
    pins = Pins()
    pins.put("p", DURABLE)
    pins.look()
    pins.look(100)
    assert pins.durable.count == 0
    assert pins.counts() == {DURABLE: 1}


def test_a_pin_that_loses_its_durability_waits_from_then_on() -> None:
    pins = Pins()
    pins.put("p", DURABLE)
    pins.look()
    pins.states["p"] = CAPTURING
    pins.look(40)
    pins.look(6)
    assert pins.watch.standing()[CAPTURING].oldest_wait_s == 6
    pins.states["p"] = DURABLE
    pins.look(2)
    assert pins.durable.total == 8


def test_the_one_that_has_waited_longest_counts() -> None:
    pins = Pins()
    pins.pin("old", CAPTURING)
    pins.look(7)
    pins.pin("new", CAPTURING)
    pins.look()
    assert pins.watch.standing()[CAPTURING].oldest_wait_s == 7


def test_looks_become_rare_and_never_stop() -> None:
    """Counting a long prompt's chunks twice a second, for one that its quota keeps off the disk for days."""
    pins = Pins()
    pins.pin("p", PromptState.OVER_QUOTA)
    for _ in range(2 * 3600):
        pins.look(0.5)
    assert 120 <= len(pins.looks) <= 200, (
        "ten in its first second, then each after a tenth of its age, at last each 30 s"
    )


def test_what_is_unpinned_or_forgotten_is_not_counted() -> None:
    pins = Pins()
    pins.pin("p", CAPTURING)
    pins.look()
    pins.book.forget(pins.book.get("p"))
    pins.look(1)
    assert not pins.counts()


def test_the_loop_has_its_turn_each_millisecond() -> None:
    pins = Pins()
    for number in range(100):
        pins.put(f"p{number}", DURABLE)
    num_turns = 0

    async def turn(_: float) -> None:
        nonlocal num_turns
        num_turns += 1

    def state_of(prompt: PromptRow) -> PromptState:
        pins.now_s += 0.0003
        return DURABLE

    watch = PinWatch(pins.book, state_of, pins.durable, now_s=lambda: pins.now_s, sleep=turn)
    asyncio.run(watch.look())
    assert watch.standing()[DURABLE].num_pins == 100
    assert num_turns == 25
