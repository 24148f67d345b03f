"""What became of requests: the last ones, totals for the metrics, and what each pin saved."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator

from kvtier.concurrency.turns import Breather
from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier.errors import TierIOError
from kvtier.obs.log import log_event
from kvtier.outcomes.pin_usage import PinUsage
from kvtier.outcomes.recent_requests import EndedRequest, RecentRequests
from kvtier.outcomes.saved_usage import SavedUsage, encoded
from kvtier.prompts.book import PromptBook
from kvtier.sessions.session import Session
from kvtier.tiering.resources import Resources

logger = logging.getLogger(__name__)

SAVE_INTERVAL_S = 300.0
"""What a crash forgets of the usage of pins."""
_USE_PERIOD_S = 1.0


class OutcomeBook:
    """Loop thread only.

    Args:
        resources: Counters, the disk, and a thread for it.
        prompts: All prompts. Usage is kept by pin id, so it follows a pin that is renamed, and ends with it.

    Attributes:
        recent: The last requests.
        on_use: Called with pin id and time (seconds since 1970) when a request began with a whole pin, whatever its
            outcome: at most once a second for each pin.
    """

    def __init__(self, resources: Resources, prompts: PromptBook) -> None:
        self.recent = RecentRequests()
        self.on_use: Callable[[str, float], None] = lambda pin_id, used_unix_s: None
        self._resources, self._prompts = resources, prompts
        self._saved = SavedUsage(resources.config.disk.disk_dir)
        self._usage: dict[str, PinUsage] = {}
        self._announced_unix_s: dict[str, float] = {}  # by pin id, when `on_use` was called last
        self._is_saved = True

    def usage_of(self, pin_id: str) -> PinUsage | None:
        """Return what requests had of a pin; None when there was none."""
        return self._usage.get(pin_id)

    async def take(self, session: Session, requests: Iterator[EndedRequest], num_dropped: int) -> None:
        """Count what an engine reports, with turns of the loop in between."""
        breather = Breather()
        for request in requests:
            self._count(request, session.namespace.cost.prefill_tokens_per_s)
            await breather.pause()
        self._resources.counters.requests_unreported += num_dropped

    def _count(self, request: EndedRequest, prefill_tokens_per_s: float) -> None:
        self.recent.add(request)
        counters = self._resources.counters
        name = f"requests_{request.outcome.value}"
        setattr(counters, name, getattr(counters, name) + 1)
        cached_tokens = request.device_tokens + request.host_tokens + request.disk_tokens
        counters.prompt_tokens_device += request.device_tokens
        counters.prompt_tokens_host += request.host_tokens
        counters.prompt_tokens_disk += request.disk_tokens
        counters.prompt_tokens_computed += max(0, request.prompt_tokens - cached_tokens)
        counters.saved_prefill_seconds += (request.host_tokens + request.disk_tokens) / prefill_tokens_per_s
        if self._prompts.by_pin_id(request.pin_id) is None:  # none, or forgotten meanwhile
            return
        usage = self._usage.setdefault(request.pin_id, PinUsage())
        usage.add(request, prefill_tokens_per_s)
        self._is_saved = False
        if request.outcome is not RequestOutcome.DIVERGED:
            self._announce(request.pin_id, request.ended_unix_s)

    def _announce(self, pin_id: str, used_unix_s: float) -> None:
        if abs(used_unix_s - self._announced_unix_s.get(pin_id, 0.0)) >= _USE_PERIOD_S:  # the clock may be set back
            self._announced_unix_s[pin_id] = used_unix_s
            self.on_use(pin_id, used_unix_s)

    # On disk

    async def load(self) -> None:
        """Go on from what a previous daemon has saved; once, before engines attach."""
        self._usage = await self._resources.in_background(self._saved.load)
        self._forget_ended()

    async def run(self) -> None:
        """Save now and then, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_INTERVAL_S)
            await self.save()

    async def save(self) -> None:
        """Write the usage of all pins if it has changed; what fails is logged, and written the next time."""
        if self._is_saved:
            return
        self._is_saved = True
        self._forget_ended()
        pins = {pin_id: encoded(usage) for pin_id, usage in self._usage.items()}
        try:
            await self._resources.in_background(self._saved.write, pins)
        except (OSError, TierIOError) as error:
            self._is_saved = False  # the next time, whether something comes until then or not
            log_event(logger, "usage_not_saved", level=logging.WARNING, problem=str(error))

    def _forget_ended(self) -> None:
        for kept in (self._usage, self._announced_unix_s):
            for pin_id in [each for each in kept if self._prompts.by_pin_id(each) is None]:
                del kept[pin_id]


def bounded_end(ended_unix_s: float) -> float:
    """Return when a request ended, not later than now: an engine's clock cannot be ahead of ours on one host."""
    now_unix_s = time.time()
    return ended_unix_s if 0 < ended_unix_s <= now_unix_s else now_unix_s
