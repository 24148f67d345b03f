"""Watches of log events: from any thread, whatever is logged, bounded, and without what must not be shown."""

import asyncio
import logging
import threading

from kvtier.obs import log
from kvtier.obs.event_watches import DROPPED, EventWatch, WatchedEvent, watching_events
from kvtier.obs.log import events_to, log_event

logger = logging.getLogger("kvtier.test_event_watches")


async def read(watch: EventWatch, num_events: int) -> list[WatchedEvent]:
    events = watch.events()
    async with asyncio.timeout(10):
        return [await anext(events) for _ in range(num_events)]


def test_events_of_any_thread_are_read_in_order_whatever_level_is_logged() -> None:
    async def scenario() -> None:
        with watching_events(()) as watch:
            log_event(logger, "quiet", level=logging.DEBUG)
            thread = threading.Thread(target=lambda: log_event(logger, "first", name="p", tokens=[1], bytes=3))
            thread.start()
            thread.join()
            log_event(logger, "second", level=logging.ERROR, problem="x" * 100_000)
            first, second = await read(watch, 2)
        assert (first.name, first.level, dict(first.fields)) == (
            "first",
            "info",
            {"name": "p", "tokens": "<withheld>", "bytes": "3"},
        )
        assert (second.name, second.level) == ("second", "error")
        assert len(second.fields["problem"]) < 10_000
        assert first.unix_s <= second.unix_s

    logger.setLevel(logging.CRITICAL)
    try:
        asyncio.run(scenario())
    finally:
        logger.setLevel(logging.NOTSET)
    assert not log._sinks


def test_a_slow_reader_loses_the_oldest_and_learns_how_many() -> None:
    async def scenario() -> None:
        watch = EventWatch(max_waiting=3)
        with events_to(watch.add):
            for number in range(5):
                log_event(logger, f"event_{number}")
            events = await read(watch, 4)
        assert [event.name for event in events] == [DROPPED, "event_2", "event_3", "event_4"]
        assert events[0].fields == {"events": "2"}

    asyncio.run(scenario())


def test_only_the_names_that_were_asked_for() -> None:
    async def scenario() -> None:
        with watching_events(["wanted"]) as watch:
            log_event(logger, "other")
            log_event(logger, "wanted")
            assert [event.name for event in await read(watch, 1)] == ["wanted"]

    asyncio.run(scenario())


def test_an_event_after_the_loop_has_ended_is_lost_and_harms_no_one() -> None:
    async def scenario() -> EventWatch:
        return EventWatch()

    watch = asyncio.run(scenario())
    watch.add("late", logging.INFO, 0.0, {})
