"""Lets an engine that has nothing to compute wait a moment for the daemon's answer."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvtier_connector.scheduler.request_state import Phase, RequestState

if TYPE_CHECKING:
    from vllm.config import VllmConfig

IDLE_WAIT_S = 0.005
"""How long a step may wait for daemon events, when every request that vLLM has waits for them too."""
_MAX_WAITING = 32
"""With more requests than this the engine counts as busy: looking through them at each lookup would cost time."""


def idle_wait_s(vllm_config: "VllmConfig") -> float:
    """Return how long an engine without anything to compute may wait in a step.

    Data parallel engines of a mixture of experts step together: one without tokens computes a dummy batch.
    Source: `DPEngineCoreProc` of vLLM 0.32.
    """
    is_lockstep = vllm_config.parallel_config.data_parallel_size > 1 and vllm_config.model_config.is_moe
    return 0.0 if is_lockstep else IDLE_WAIT_S


class IdleWait:
    """At most one wait of `wait_s` per step. Scheduler thread only.

    An empty step of vLLM takes 2 ms, in half of which it sleeps. With several workers it spins instead, in
    `os.sched_yield`, which keeps the interpreter's lock from the session's threads: on a busy machine the answer took
    seconds to get through. Nothing is computed meanwhile, and a request that comes now loses 5 ms.
    """

    def __init__(
        self,
        requests: Mapping[str, RequestState],
        wait_for_events: Callable[[float], bool],
        clock: Callable[[], float],
        wait_s: float = IDLE_WAIT_S,
    ) -> None:
        self._requests, self._wait_for_events, self._clock, self._wait_s = requests, wait_for_events, clock, wait_s
        self._until_s: float | None = None  # when this step's wait ends; None: it has not begun
        self._is_awaited = False

    def lookup_waits(self) -> None:
        """A lookup is not decided: vLLM asks again in the next step."""
        self._is_awaited = True

    def wait_in_lookup(self) -> bool:
        """Wait if every request waits for the daemon; return whether an event is there."""
        return self._is_idle() and self._wait()

    def step_scheduled(self, num_tokens: int, *, session_awaited: bool) -> None:
        """Called once per scheduled step. If the step is empty, wait for daemon events."""
        if not num_tokens and (self._is_awaited or session_awaited):
            self._wait()
        self._is_awaited, self._until_s = False, None

    def _wait(self) -> bool:
        now_s = self._clock()
        self._until_s = now_s + self._wait_s if self._until_s is None else self._until_s
        return now_s < self._until_s and self._wait_for_events(self._until_s - now_s)

    def _is_idle(self) -> bool:
        return len(self._requests) <= _MAX_WAITING and all(
            state.phase in (Phase.STORING, Phase.ASKED, Phase.PROMOTING) or state.is_finished()
            for state in self._requests.values()
        )
