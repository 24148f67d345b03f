"""Asks an engine how much of its pins is in vLLM's prefix cache: only the engine knows."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from kvtier.core.limits import MAX_ASKED_PINS
from kvtier.errors import InvalidArgumentError
from kvtier.sessions.engine_peer import EnginePeer

ANSWER_TIMEOUT_S = 5.0
"""It counts in a thread of its own, after the pins that it has yet to bind."""


class DeviceCount(NamedTuple):
    """Blocks of a pin in vLLM's prefix cache, from the first one on; `num_blocks` 0: the engine has not bound it."""

    num_blocks: int
    num_cached: int


@dataclass(frozen=True)
class DeviceCounts:
    """What an engine has answered: counts by pin id, or why there are none."""

    by_pin: Mapping[str, DeviceCount] = field(default_factory=dict)
    problem: str = ""


_GONE = DeviceCounts(problem="the engine has gone")


@dataclass
class _Question:
    """One message's; its answer has a count for each pin."""

    pin_ids: Sequence[str]
    answer: "asyncio.Future[DeviceCounts]"


class DeviceBlocks:
    """Questions of one session that wait for their answers. Loop thread only."""

    def __init__(self, peer: EnginePeer) -> None:
        self._peer = peer
        self._ids = count(1)
        self._waiting: dict[int, _Question] = {}
        self._is_over = False

    async def count(self, pin_ids: Sequence[str]) -> DeviceCounts:
        """Return what the engine says of these pins; with a problem if it cannot, or does not answer in time."""
        by_pin: dict[str, DeviceCount] = {}
        for first in range(0, len(pin_ids), MAX_ASKED_PINS):
            counted = await self._ask(pin_ids[first : first + MAX_ASKED_PINS])
            if counted.problem:
                return counted
            by_pin |= counted.by_pin
        return DeviceCounts(by_pin)

    async def _ask(self, pin_ids: Sequence[str]) -> DeviceCounts:
        question = _Question(pin_ids, asyncio.get_running_loop().create_future())
        if self._is_over:
            return _GONE
        ask_id = next(self._ids)
        self._waiting[ask_id] = question
        self._peer.device_blocks_wanted(ask_id, pin_ids)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await question.answer
        except TimeoutError:
            return DeviceCounts(problem=f"the engine did not say within {ANSWER_TIMEOUT_S:g} s what vLLM has cached")
        finally:
            self._waiting.pop(ask_id, None)

    def answered(self, ask_id: int, num_blocks: Sequence[int], num_cached: Sequence[int], problem: str) -> None:
        """Take in an answer; one that came too late is ignored.

        Raises:
            InvalidArgumentError: It has not one count for each pin.
        """
        question = self._waiting.pop(ask_id, None)
        if question is None:
            return
        if problem:
            _resolve(question, DeviceCounts(problem=problem))
            return
        if not len(num_blocks) == len(num_cached) == len(question.pin_ids):
            lengths, remedy = f"{len(num_blocks)} and {len(num_cached)} counts", "give one for each pin asked for"
            _resolve(question, DeviceCounts(problem=f"the engine answered with {lengths}"))
            raise InvalidArgumentError("device_blocks", lengths, remedy)
        _resolve(question, DeviceCounts(dict(_counts(question.pin_ids, num_blocks, num_cached))))

    def end(self) -> None:
        """The session is over, and so is waiting for answers."""
        self._is_over = True
        for question in self._waiting.values():
            _resolve(question, _GONE)
        self._waiting.clear()


def _counts(
    pin_ids: Sequence[str], num_blocks: Sequence[int], num_cached: Sequence[int]
) -> Iterator[tuple[str, DeviceCount]]:
    for pin_id, blocks, cached in zip(pin_ids, num_blocks, num_cached, strict=True):
        yield pin_id, DeviceCount(blocks, cached)


def _resolve(question: _Question, counts: DeviceCounts) -> None:
    if not question.answer.done():  # it is, if the caller has gone
        question.answer.set_result(counts)
