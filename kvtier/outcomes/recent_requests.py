"""The last requests that engines have reported, a bounded number."""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice

from kvtier.core import limits
from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier.errors import RequestNotFoundError

MAX_RECENT_REQUESTS = 4096
"""Of the daemon: some 2 MB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedRequest:
    """RequestEnded of proto/kvtier/v1/engine.proto, checked, and the namespace of its engine.

    Raises:
        InvalidArgumentError: A field cannot be used.
    """

    request_id: str
    outcome: RequestOutcome
    pin_id: str
    prompt_tokens: int
    shared_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    ended_unix_s: float
    namespace_id: str

    def __post_init__(self) -> None:
        limits.REQUEST_ID.check("requests_ended.request_id", self.request_id)
        limits.PIN_ID.check("requests_ended.pin_id", self.pin_id)
        for field in ("prompt_tokens", "shared_tokens", "device_tokens", "host_tokens", "disk_tokens"):
            limits.ENDED_TOKENS.check(f"requests_ended.{field}", getattr(self, field))


class RecentRequests:
    """Loop thread only."""

    def __init__(self) -> None:
        self._requests: deque[EndedRequest] = deque(maxlen=MAX_RECENT_REQUESTS)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: EndedRequest) -> None:
        """Keep a request; the oldest one is dropped when there are too many."""
        self._requests.append(request)

    def find(self, request_id: str) -> EndedRequest:
        """Return the last request with this id.

        It may be what the answer has as its id, or the client's own X-Request-Id: vLLM's API puts the name of the
        endpoint before that, and appends the prompt's index to that of a completion, or the turn's to that of a
        response. With `n` above 1 the index of the answer stands before all that: the first one is found.

        Raises:
            RequestNotFoundError: None of those that are kept has it.
        """
        single = (request_id, f"{request_id}-0", f"{request_id}_0", f"chatcmpl-{request_id}", f"cmpl-{request_id}-0")
        ids = {*single, *(f"0_{each}" for each in single)}
        found = next((each for each in reversed(self._requests) if each.request_id in ids), None)
        if found is None:
            raise RequestNotFoundError(request_id, len(self._requests))
        return found

    def last_of(self, pin_id: str) -> EndedRequest | None:
        """Return the last request of this pin, if one is kept."""
        return next((each for each in reversed(self._requests) if each.pin_id == pin_id), None)

    def last(
        self, max_requests: int, outcomes: Collection[RequestOutcome] = (), *, misses_only: bool = False
    ) -> list[EndedRequest]:
        """Return the last requests, the newest first: of these outcomes (none: of all), or misses."""
        return list(islice(self._selected(outcomes, misses_only=misses_only), max_requests))

    def _selected(self, outcomes: Collection[RequestOutcome], *, misses_only: bool) -> Iterator[EndedRequest]:
        for each in reversed(self._requests):
            if (not outcomes or each.outcome in outcomes) and (each.outcome.is_miss or not misses_only):
                yield each
