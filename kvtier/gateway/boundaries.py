"""Finds how many tokens of a prompt are before a marker: vLLM renders it with two endings, and their beginning counts.

A boundary is found once: later requests with the same prompt up to the marker find it in a bounded table.
"""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

from kvtier.core.tokens import common_prefix
from kvtier.errors import RenderError
from kvtier.gateway.asgi import apart, to_json
from kvtier.gateway.markers.marked_request import Api, Json, MarkedRequest, Marker
from kvtier.gateway.usage_numbers import MarkedPlace

Render = Callable[[Api, Json], Coroutine[Any, Any, list[int] | None]]
"""Returns the token ids of a prompt; None when vLLM refuses the conversation. RenderError: it cannot render now."""

MAX_ENTRIES = 4096
"""Of a digest and a number each: half a megabyte."""
MAX_AGE_S = 3600.0
"""vLLM may be restarted with another template or model behind a gateway that keeps running."""
REFUSED_AGE_S = 60.0
"""Of a conversation that vLLM did not render: it may have been the moment."""
TIMEOUT_S = 10.0
"""For all markers of a request; then it goes on without a pin."""
MAX_CONCURRENT, MAX_PER_OWNER = 4, 2
"""Requests whose boundaries are being rendered; further ones wait. Rendering keeps vLLM's API server busy."""
WAIT_S = 0.5
"""For one's turn, likewise: prompts of others that are slow to render delay a request no longer than that."""

_DEPTH = 4
"""Of what variants share below their fields: turns, and parts of a turn's content."""

_log = logging.getLogger(__name__)


class Boundaries:
    """Boundaries of prompts, the most recently used of them kept. One event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._slots_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by owner
        self._warned: set[str] = set()

    async def find(
        self, request: MarkedRequest, render: Render, owner: str = "", num_bytes: int = 0
    ) -> list[MarkedPlace]:
        """Return the breakpoints of a request in the order of its prompt; those that cannot be found are left out.

        Args:
            num_bytes: Of the request as it arrived.
        """
        keys = await apart(num_bytes, _digests, request)
        known = [self._known(key) for key in keys]
        if None in known:
            try:
                async with self._turn(owner), asyncio.timeout(TIMEOUT_S):
                    known = [
                        await self._find(request.api, key, marker, render, num_bytes)
                        for key, marker in zip(keys, request.markers, strict=True)
                    ]
            except TimeoutError:
                self._warn(f"vLLM renders prompts too slowly ({WAIT_S:g} s, {TIMEOUT_S:g} s): a request is not pinned")
            except RenderError as exc:
                self._warn(f"cache markers have no effect: {exc}")
        longest_ttl_s: dict[int, int] = {}
        for num_tokens, marker in zip(known, request.markers, strict=True):
            if num_tokens:
                longest_ttl_s[num_tokens] = max(marker.ttl_s, longest_ttl_s.get(num_tokens, 0))
        return [MarkedPlace(num_tokens, ttl_s) for num_tokens, ttl_s in sorted(longest_ttl_s.items())]

    @asynccontextmanager
    async def _turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for one of the slots. TimeoutError: none is free in time."""
        own_slots = self._slots_of.setdefault(owner, asyncio.Semaphore(MAX_PER_OWNER))
        async with AsyncExitStack() as held:
            async with asyncio.timeout(WAIT_S):
                await held.enter_async_context(own_slots)
                await held.enter_async_context(self._slots)
            yield

    def _known(self, key: bytes) -> int | None:
        entry = self._found.get(key)
        if entry is None or entry[1] < self._clock():
            return None
        self._found.move_to_end(key)
        return entry[0]

    async def _find(self, api: Api, key: bytes, marker: Marker, render: Render, num_bytes: int) -> int:
        if (known := self._known(key)) is not None:  # found while this request waited for its turn
            return known
        rendered = await _together(render(api, variant) for variant in marker.variants)
        complete = [tokens for tokens in rendered if tokens is not None]
        # With one rendering alone, no one knows where the marker is.
        is_complete = len(complete) == len(rendered)
        num_tokens = len(await apart(num_bytes, common_prefix, complete)) if is_complete else 0
        self._found[key] = num_tokens, self._clock() + (MAX_AGE_S if num_tokens else REFUSED_AGE_S)
        if len(self._found) > MAX_ENTRIES:
            self._found.popitem(last=False)
        return num_tokens

    def _warn(self, text: str) -> None:
        if text not in self._warned and len(self._warned) < 100:
            self._warned.add(text)
            _log.warning("%s (said once)", text)


async def _together(rendering: Iterable[Coroutine[Any, Any, list[int] | None]]) -> list[list[int] | None]:
    """Await all; the first error ends the others, which would go on when their slot is another request's."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in rendering]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def _digests(request: MarkedRequest) -> list[bytes]:
    """Return what identifies each marker: all that is rendered for it.

    What one owner lets follow the marker, vLLM may refuse to render, and another's not.
    """
    known: dict[int, str] = {}  # by id, of what lives as long as the request
    variants = [[_digest(variant, _DEPTH, known) for variant in marker.variants] for marker in request.markers]
    return [hashlib.blake2b(to_json([request.api, *each]), digest_size=16).digest() for each in variants]


def _digest(value: Any, depth: int, known: dict[int, str]) -> str:
    """Return the digest of a part of a variant. Variants share most parts, and each is written once."""
    if (digest := known.get(id(value))) is not None:
        return digest
    written = value
    if depth and isinstance(value, dict):
        written = {name: _digest(each, depth - 1, known) for name, each in value.items()}
    elif depth and isinstance(value, list):
        written = [_digest(each, depth - 1, known) for each in value]
    digest = hashlib.blake2b(to_json(written), digest_size=16).hexdigest()
    if isinstance(value, dict | list):
        known[id(value)] = digest
    return digest
