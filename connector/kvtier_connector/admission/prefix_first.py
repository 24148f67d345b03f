"""Which waiting requests let others pass: those that need the blocks of a whole prompt, while others need few.

vLLM admits requests in the order in which they came, and stops at the first that finds no blocks. With more prompts
than its pool can hold that is soon one whose prompt has to be loaded, and it needs the blocks of a whole prompt. Those
behind it wait with it, although most of them need a few blocks each: their prompt is in the pool. So such a request
lets small ones pass; those that need more stay behind it. Pure: what vLLM's pool has is an argument.

If all of them passed, requests for the prompts in the pool would keep these there, and a request for another prompt
would wait until no more of them come. So while one waits, a request passes only if its prompt has been in use for less
time than a request runs. A prompt that is in use for longer takes no more requests, and its blocks are free when its
last request has ended.

What a request needs is an estimate. One is tried every `MAX_STEPS` steps, and after a step that computed nothing: so no
estimate makes a request wait for long.
"""

from dataclasses import dataclass
from itertools import count

MAX_PASSED = 32
"""Requests that came later and are admitted before one that waits. It bounds requests whose prompt no other uses; those
that share a prompt are bounded by how long a request runs (ADR 26)."""
NEWEST_RUN_WEIGHT = 0.1
"""Of a request that has ended, in the mean of how long they run."""
MAX_STEPS = 32
"""Steps in which requests let others pass before one is tried. If it does not fit, vLLM stops there for a step; with
a try every other step nearly all of the gain was lost (ADR 26)."""
SMALL_RATIO = 0.25
"""Of the blocks that a waiting request needs, what those at most need that it lets pass."""
MAX_HELD = 32
"""Requests that are not admitted in a step so that vLLM goes on to others. It looks at each again in the next step."""
MAX_SCANNED_BLOCKS = 1024
"""Blocks that those have in vLLM's prefix cache: to look at one again takes vLLM a microsecond or two."""


@dataclass(kw_only=True, slots=True)
class _Waiting:
    number: int  # in the order in which requests came
    num_passed: int = 0  # later requests that were admitted first


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockNeed:
    """What one request would take.

    Attributes:
        num_needed: Blocks that it takes out of vLLM's free ones.
        num_scanned: Blocks that vLLM looks up for it at each question.
        is_load: Whether most of what it needs is loaded. What has to be computed lets nothing pass.
        prompt_since: The step since which its prompt has been in use without a break; None: it is not in use.
    """

    num_needed: int
    num_scanned: int
    is_load: bool
    prompt_since: int | None = None


class PrefixFirst:
    """The requests that vLLM has not admitted yet. Scheduler thread only; a step is what vLLM schedules at once."""

    def __init__(self) -> None:
        self._numbers = count()
        self._waiting: dict[str, _Waiting] = {}
        self._running: dict[str, int] = {}  # admitted requests, each with the step in which it was
        self._mean_run: float | None = None  # steps from there to a request's end
        self._stopped: dict[str, int] = {}  # requests at which vLLM stopped, with the blocks that they need
        self._num_steps = 0  # in which requests let others pass, since one was tried
        self._is_try_due = False
        self.num_passed = 0  # requests that were passed, each counted once
        self.step = 0  # steps that computed something
        self._step_begins()

    def _step_begins(self) -> None:
        self._answers: dict[str, bool] = {}
        self._held: list[_Waiting] = []  # in this step: those that let others pass, and those that stay behind them
        self._num_scanned = 0
        self._max_small: float | None = None  # blocks that a request may need to pass all of them
        self._tried: tuple[str, int] | None = None  # the last one, and the blocks that it needs

    def arrived(self, req_id: str) -> None:
        """A request came; those that were there before keep their place."""
        self._waiting[req_id] = _Waiting(number=next(self._numbers))

    def is_held(self, req_id: str, need: BlockNeed, num_free: int) -> bool:
        """Return whether vLLM shall go on to the next request, and ask for this one again in the next step.

        Args:
            req_id: The request that vLLM would try next. One that never arrived, or was admitted before, is not held.
            need: What it would take.
            num_free: Free blocks.
        """
        waiting = self._waiting.get(req_id)
        if waiting is None:
            return False
        if (known := self._answers.get(req_id)) is not None:
            return known
        is_held = False
        if len(self._held) < MAX_HELD and self._num_scanned + need.num_scanned <= MAX_SCANNED_BLOCKS:
            is_held = self._stays_behind(need) or self._lets_pass(waiting, need, num_free)
        self._answers[req_id] = is_held
        if is_held:
            self._held.append(waiting)
            self._num_scanned += need.num_scanned
        else:
            self._tried = req_id, need.num_needed
        return is_held

    def _stays_behind(self, need: BlockNeed) -> bool:
        if self._max_small is None:
            return False
        if need.num_needed > self._max_small or any(each.num_passed >= MAX_PASSED for each in self._held):
            return True
        if need.prompt_since is None or self._mean_run is None:
            return False
        return self.step - need.prompt_since > self._mean_run

    def _lets_pass(self, waiting: _Waiting, need: BlockNeed, num_free: int) -> bool:
        if not need.is_load or waiting.num_passed >= MAX_PASSED:
            return False
        max_small = SMALL_RATIO * need.num_needed
        num_small = sum(num_needed for num_needed in self._stopped.values() if num_needed <= max_small)
        if num_free >= need.num_needed + num_small:
            return False
        if self._is_try_due:
            self._is_try_due = False
            return False
        self._max_small = max_small if self._max_small is None else min(max_small, self._max_small)
        return True

    def admitted(self, req_id: str) -> None:
        """vLLM has given the request blocks: it has passed those that came before it and are held."""
        waiting = self._waiting.pop(req_id, None)
        self._stopped.pop(req_id, None)
        if waiting is None:
            return
        self._running[req_id] = self.step
        for other in self._held:
            if other.number < waiting.number:
                self.num_passed += not other.num_passed
                other.num_passed += 1

    def ended(self, req_id: str) -> None:
        """The request is over, admitted or not."""
        self._waiting.pop(req_id, None)
        self._stopped.pop(req_id, None)
        since = self._running.pop(req_id, None)
        if since is not None:
            run = self.step - since
            mean = run if self._mean_run is None else self._mean_run
            self._mean_run = mean + NEWEST_RUN_WEIGHT * (run - mean)

    def step_ends(self, num_tokens: int) -> None:
        """A step over this many tokens is scheduled."""
        self.step += num_tokens > 0
        if self._tried is not None:
            req_id, num_needed = self._tried
            if req_id in self._waiting:  # vLLM stopped there
                self._stopped[req_id] = num_needed
        if self._held:
            self._num_steps += 1
            self._is_try_due = not num_tokens or self._num_steps >= MAX_STEPS
            if self._is_try_due:
                self._num_steps = 0
        if self._answers:
            self._step_begins()
