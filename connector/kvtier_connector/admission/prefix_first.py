"""Which waiting requests let later ones pass: those that need the blocks of a whole prompt, while others need few.

vLLM admits requests in the order in which they came, and stops at the first that finds no blocks. With more prompts
than its pool can hold that is soon one whose prompt has to be loaded, and it needs the blocks of a whole prompt. Those
behind it wait with it, although the prompt of some is in the pool and they need a few blocks each. So such a request
lets them pass. Pure: what vLLM's pool has is an argument.

No request waits for ever: it lets at most `MAX_PASSED` pass, and vLLM tries it after `MAX_VAIN_STEPS` in which none
did, or after one step in which nothing was computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

MAX_PASSED = 16
"""Requests that came later and are admitted before one that waits. 8 gave less throughput (13.5 turns a second of 64
users, where 16 gave 14.2, and vLLM's order 12.0), 32 no more, and its slowest first tokens came later."""
MAX_VAIN_STEPS = 32
"""Steps in which a request lets others pass and none does. A try that fails has vLLM stop there for a step; with one
every other step nearly all of the gain was lost (12.3 turns a second where vLLM's order gave 12.7)."""
MAX_WAITING = 16
"""Requests that let others pass in one step: vLLM looks at each again in the next, which costs its scheduler time."""
SMALL_RATIO = 0.25
"""Of the blocks that a waiting request needs, what those at most need that it lets pass."""


@dataclass(kw_only=True, slots=True)
class _Waiting:
    number: int  # in the order in which requests came
    num_needed: int = 0  # free blocks, as of the last question; 0 before the first
    num_passed: int = 0  # later requests that were admitted first
    num_passed_before_step: int = 0
    num_vain_steps: int = 0  # in a row: it let others pass, and none did
    must_be_tried: bool = False


class PrefixFirst:
    """The requests that vLLM has not admitted yet. Scheduler thread only; a step is what vLLM schedules at once."""

    def __init__(self) -> None:
        self._numbers = count()
        self._waiting: dict[str, _Waiting] = {}
        self._asked: dict[str, _Waiting] = {}  # of those, the ones that vLLM has asked for
        self._passing: dict[str, bool] = {}  # the answers of this step: whether the request lets others pass
        self.num_passed = 0  # requests that were passed, each counted once

    def arrived(self, req_id: str) -> None:
        """A request came; those that were there before keep their place."""
        self._waiting[req_id] = _Waiting(number=next(self._numbers))

    def lets_pass(self, req_id: str, num_needed: int, num_free: int, *, is_load: bool) -> bool:
        """Return whether the request lets others pass in this step: vLLM then asks for those behind it.

        Args:
            req_id: A request that vLLM would admit next. One that never arrived, or was admitted before, passes none.
            num_needed: Blocks that it takes out of vLLM's free ones.
            num_free: Those.
            is_load: Whether a prompt is loaded for it. One that has to be computed keeps its place.
        """
        waiting = self._waiting.get(req_id)
        if waiting is None:
            return False
        if (known := self._passing.get(req_id)) is not None:
            return known
        self._asked[req_id] = waiting
        waiting.num_needed = num_needed
        lets_pass = is_load and self._must_pass(waiting, num_free)
        if waiting.must_be_tried:
            waiting.num_vain_steps, waiting.must_be_tried = 0, False
        if is_load:
            self._passing[req_id] = lets_pass
            waiting.num_passed_before_step = waiting.num_passed
        return lets_pass

    def _must_pass(self, waiting: _Waiting, num_free: int) -> bool:
        if waiting.must_be_tried or waiting.num_passed >= MAX_PASSED or sum(self._passing.values()) >= MAX_WAITING:
            return False
        most = SMALL_RATIO * waiting.num_needed
        num_small = sum(other.num_needed for other in self._asked.values() if other.num_needed <= most)
        return num_free < waiting.num_needed + num_small

    def admitted(self, req_id: str) -> None:
        """vLLM has given the request blocks: it has passed those that came before it."""
        waiting = self._waiting.get(req_id)
        self.ended(req_id)
        if waiting is None:
            return
        for other in self._passing_now():
            if other.number < waiting.number:
                self.num_passed += not other.num_passed
                other.num_passed += 1

    def ended(self, req_id: str) -> None:
        """The request waits no longer."""
        self._waiting.pop(req_id, None)
        self._asked.pop(req_id, None)

    def step_ends(self, num_tokens: int) -> None:
        """A step over this many tokens is scheduled."""
        for waiting in self._passing_now():
            is_vain = waiting.num_passed == waiting.num_passed_before_step
            waiting.num_vain_steps = waiting.num_vain_steps + 1 if is_vain else 0
            waiting.must_be_tried = is_vain and (not num_tokens or waiting.num_vain_steps >= MAX_VAIN_STEPS)
        self._passing.clear()

    def _passing_now(self) -> Iterator[_Waiting]:
        for req_id, lets_pass in self._passing.items():
            if lets_pass and (waiting := self._waiting.get(req_id)) is not None:
                yield waiting
