"""Readiness: whether pinned prompts can be restored now, and what those that cannot wait for."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kvtier.concurrency.turns import Breather
from kvtier.errors import PromptNotFoundError
from kvtier.ledger import BindingRow, PromptRow
from kvtier.prompts.book import PromptBook
from kvtier.prompts.pins import Pins
from kvtier.prompts.states.status import PromptState, why_not_readable
from kvtier.sessions.device_blocks import DeviceCount, DeviceCounts
from kvtier.sessions.session import Session
from kvtier.tiering.namespace import Namespace

MAX_WAITING_PROMPTS = 100
_STORE = "remote.url"
"""Stands for all prompts of the fleet while none of them is known."""
_NOT_BOUND = DeviceCount(0, 0)

_OnDevice = Mapping[str, DeviceCounts]
"""What engines have in vLLM's prefix cache, by session."""


class ReadyWhere(Enum):
    """ReadyRequest.Where of proto/kvtier/v1/cache.proto; the meanings stand there."""

    DISK = auto()
    HOST = auto()
    DEVICE = auto()


@dataclass(frozen=True, kw_only=True)
class WaitingPrompt:
    """A prompt that is not ready, and what it waits for."""

    name: str
    state: PromptState
    why: str


@dataclass
class Readiness:
    """See Readiness of proto/kvtier/v1/cache.proto."""

    num_prompts: int = 0
    num_ready: int = 0
    waiting: list[WaitingPrompt] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        """Every prompt is."""
        return self.num_ready == self.num_prompts


class ReadinessChecker:
    """Judges by what is known ahead, and counts chunks only where that says too little. Loop thread only.

    Args:
        pins: Their watch has looked at all prompts lately.
        prompts: All prompts; the cache's own, which change, as do its namespaces.
        live_sessions: Returns the engines attached now.

    Attributes:
        fleet_problem: Says why this host does not know the fleet's pins; empty: it does, or there is no fleet.
    """

    def __init__(
        self,
        pins: Pins,
        prompts: PromptBook,
        namespaces: Mapping[str, Namespace],
        live_sessions: Callable[[], Sequence[Session]],
    ) -> None:
        self._pins, self._prompts, self._namespaces = pins, prompts, namespaces
        self._live_sessions = live_sessions
        self.fleet_problem: Callable[[], str] = lambda: ""
        pins.watch.why_not_readable = self._why_not_readable

    def problem(self) -> str:
        """Say why not every prompt that operators pinned is durable for the attached engines, and can be restored.

        Empty: each is, and can.

        It names no prompt: everyone who reaches /metrics may read it.

        Costs as much as there are namespaces, and pins of other hosts that are not durable here. Late by half a second
        for a pin that became durable, by half a minute for one that is durable no longer.
        """
        if not self._pins.watch.has_looked:
            return "the daemon has just started and has not looked at its pins yet"
        if self.fleet_problem():
            return "the pins of the store are not known yet"
        for namespace in self._namespaces.values():
            if namespace.quarantine is not None and namespace.live:
                return "a namespace is quarantined"
        if self._pins.watch.is_any_waiting():
            return "a pinned prompt is not durable yet"
        return self._pins.watch.why_unreadable()

    async def check(
        self, names: Sequence[str], where: ReadyWhere, *, may_see: Callable[[PromptRow], bool] = lambda prompt: True
    ) -> Readiness:
        """Judge these prompts, or all that operators pinned, with turns of the loop in between.

        `may_see` says whether a prompt exists for the caller.

        Raises:
            PromptNotFoundError: A name is unknown.
        """
        if names:
            prompts = [self._prompts.get(name) for name in dict.fromkeys(names)]
            for hidden in (prompt for prompt in prompts if not may_see(prompt)):
                raise PromptNotFoundError(hidden.name)
        else:
            ignores = self._pins.watch.ignores
            named = (prompt for prompt in self._prompts.pinned() if prompt.origin == "named")
            prompts = [prompt for prompt in named if may_see(prompt) and not ignores(prompt)]
        counted = await self._count_on_device(prompts) if where is ReadyWhere.DEVICE else {}
        readiness, breather = Readiness(num_prompts=len(prompts)), Breather()
        if why := self.fleet_problem():
            readiness.num_prompts += 1
            readiness.waiting.append(WaitingPrompt(name=_STORE, state=PromptState.WAITING, why=why))
        for prompt in prompts:
            waiting = self._judge(prompt, where, counted, is_exact=bool(names))
            if waiting is None:
                readiness.num_ready += 1
            elif len(readiness.waiting) < MAX_WAITING_PROMPTS:
                readiness.waiting.append(waiting)
            await breather.pause()
        readiness.waiting.sort(key=lambda each: each.name)
        return readiness

    async def _count_on_device(self, prompts: Sequence[PromptRow]) -> _OnDevice:
        """Ask every attached engine, all at once, for the prompts that it has recognized."""
        sessions = list(self._live_sessions())
        asked = [[each.pin_id for each in prompts if each.pin_id in session.bound] for session in sessions]
        questions = (session.device_blocks.count(pin_ids) for session, pin_ids in zip(sessions, asked, strict=True))
        answers = await asyncio.gather(*questions)
        return {session.session_id: answer for session, answer in zip(sessions, answers, strict=True)}

    def _judge(
        self, prompt: PromptRow, where: ReadyWhere, counted: _OnDevice, *, is_exact: bool
    ) -> WaitingPrompt | None:
        """Return what the prompt waits for; None if it is ready."""
        is_durable = not is_exact and self._pins.watch.is_durable(prompt.pin_id)
        state = PromptState.DURABLE if is_durable else self._pins.state_of(prompt)
        serving = list(self._serving(prompt))
        for namespace, _ in serving:
            if namespace.quarantine is not None:
                why = f"namespace {namespace.namespace_id} is quarantined: {namespace.quarantine.reason}"
                return WaitingPrompt(name=prompt.name, state=state, why=why)
        if state is not PromptState.DURABLE:
            return WaitingPrompt(name=prompt.name, state=state, why=self._why(prompt, state))
        if why := self._why_not_readable(prompt):
            return WaitingPrompt(name=prompt.name, state=state, why=why)
        if where is ReadyWhere.HOST:
            for namespace, row in serving:
                num_there = sum(chunk.readable for chunk in namespace.table.known(row.keys))
                if num_there < len(row.keys):
                    why = f"{num_there} of {len(row.keys)} chunks are in host memory"
                    return WaitingPrompt(name=prompt.name, state=state, why=why)
        if where is ReadyWhere.DEVICE and (why := self._why_not_on_device(prompt, counted)):
            return WaitingPrompt(name=prompt.name, state=state, why=why)
        return None

    def _why_not_readable(self, prompt: PromptRow) -> str:
        return next(filter(None, (why_not_readable(namespace, row) for namespace, row in self._serving(prompt))), "")

    def _why_not_on_device(self, prompt: PromptRow, counted: _OnDevice) -> str:
        """Say why not every engine that serves the prompt has it in vLLM's prefix cache; empty: each has."""
        answers = [counted.get(each.session_id) for each in self._live_sessions() if each.serves(prompt)]
        for answer in answers:
            if answer is None:
                return "an engine has just attached"
            if answer.problem:
                return answer.problem
            num_blocks, num_cached = answer.by_pin.get(prompt.pin_id, _NOT_BOUND)
            if not num_blocks:
                return "an engine has not recognized it yet"
            if num_cached < num_blocks:
                return f"{num_cached} of {num_blocks} blocks are in vLLM's prefix cache; `kvtier warm` loads them"
        return "" if answers else "no engine is attached"

    def _serving(self, prompt: PromptRow) -> Iterator[tuple[Namespace, BindingRow]]:
        """Yield the bindings that count: those of attached engines or, with none attached, the last one."""
        bound = self._pins.bound(prompt)
        live = [each for each in bound if each[0].live]
        yield from live or bound[-1:]

    def _why(self, prompt: PromptRow, state: PromptState) -> str:
        errors = [session.bind_errors.get(prompt.pin_id) for session in self._live_sessions()]
        if error := next(filter(None, errors), None):
            return f"an engine cannot recognize it: {error}"
        if state is PromptState.UNRENDERED:
            return "it is not turned into tokens yet"
        if state is PromptState.WAITING:
            return "no engine has recognized it yet"
        if state is PromptState.OVER_QUOTA:
            return "it does not fit into disk.bytes"
        missing = [
            f"{sum(chunk.on_disk for chunk in namespace.table.known(row.keys))} of {len(row.keys)} chunks are on disk"
            for namespace, row in self._serving(prompt)
        ]
        return "; ".join(missing) or "an engine has not recognized it yet"
