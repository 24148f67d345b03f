"""The vLLMs behind the gateway: which of them serves a model, and which answers."""

import asyncio
import hashlib
import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import httpx

from kvtier.gateway.asgi import Headers, header
from kvtier.gateway.markers.marked_request import Json

REFRESH_S = 30.0
"""How old the list of models may be."""
MIN_REFRESH_S = 1.0
"""Between two attempts with the same key, when requests name models that no vLLM has, or none takes the key."""
MAX_KEYS = 1024
"""Whose last attempt is remembered."""
_CHECK_TIMEOUT_S = 2.0
_MAX_LIST_BYTES = 4 * 1024**2
_CHECK_TIMEOUT = {"timeout": httpx.Timeout(_CHECK_TIMEOUT_S).as_dict()}


class Upstreams:
    """The base URLs of vLLMs and what they serve. One event loop.

    Args:
        urls: Without a trailing slash; at least one.
        transport: Over which they are asked.
    """

    def __init__(
        self,
        urls: Sequence[httpx.URL],
        transport: httpx.AsyncBaseTransport,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.urls = tuple(urls)
        self._transport, self._clock = transport, clock
        self._models: dict[str, httpx.URL] = {}
        self._listed_s = -math.inf  # when a vLLM has said last what it serves
        self._asked_s: OrderedDict[bytes, float] = OrderedDict()  # by digest of the key
        self._listing: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()  # likewise
        self._checking: asyncio.Task[Mapping[str, bool]] | None = None

    async def serving(self, model: str, headers: Headers) -> httpx.URL | None:
        """Return the vLLM that serves a model; None when no one does. The first of several that do is taken.

        While none has listed its models, it is the first: that one says why not (a wrong key), or serves it.

        Args:
            model: As the request names it.
            headers: Of the request: a vLLM with an API key lists its models only for who has it.
        """
        if len(self.urls) == 1:
            return self.urls[0]
        if model not in self._models or self._clock() - self._listed_s > REFRESH_S:
            await self._list(_keys(headers))
        return self._models.get(model) if self._listed_s > -math.inf else self.urls[0]

    async def models(self, headers: Headers) -> Json | None:
        """Return what all vLLMs serve, as `/v1/models` answers; None when not one says so."""
        lists = await asyncio.gather(*(self._models_of(url, _keys(headers)) for url in self.urls))
        if all(entries is None for entries in lists):
            return None
        return {"object": "list", "data": [entry for entries in lists for entry in entries or ()]}

    async def health(self) -> Mapping[str, bool]:
        """Return which vLLM answers that it is healthy, by URL. Requests meanwhile get the same answer."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check(), name="gateway-health")
        return await asyncio.shield(self._checking)

    async def _check(self) -> Mapping[str, bool]:
        answers = await asyncio.gather(*(self._get(url, "/health", ()) for url in self.urls))
        return {str(url): answer is not None for url, answer in zip(self.urls, answers, strict=True)}

    async def _list(self, keys: Headers) -> None:
        """Ask with a caller's keys: what vLLM refuses to one caller keeps no other one from asking."""
        digest = hashlib.sha256(repr(keys).encode()).digest()
        async with self._listing.setdefault(digest, asyncio.Lock()):
            if self._clock() - self._asked_s.get(digest, -math.inf) <= MIN_REFRESH_S:
                return  # another request did
            lists = await asyncio.gather(*(self._models_of(url, keys) for url in self.urls))
            self._asked_s[digest] = self._clock()
        self._asked_s.move_to_end(digest)
        if len(self._asked_s) > MAX_KEYS:
            self._asked_s.popitem(last=False)
        if all(entries is None for entries in lists):
            return
        self._listed_s = self._clock()
        found: dict[str, httpx.URL] = {}
        for url, entries in zip(self.urls, lists, strict=True):
            if entries is None:  # away, or not for this caller: what it served stays known
                names = [name for name, known in self._models.items() if known == url]
            else:
                names = [str(entry["id"]) for entry in entries]
            for name in names:
                found.setdefault(name, url)
        self._models = found

    async def _models_of(self, url: httpx.URL, keys: Headers) -> list[Json] | None:
        body = await self._get(url, "/v1/models", keys)
        try:
            entries: Any = json.loads(body or b"{}").get("data")
        except (ValueError, AttributeError, RecursionError):
            return None
        if not isinstance(entries, list):
            return None
        return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]

    async def _get(self, url: httpx.URL, path: str, headers: Headers) -> bytes | None:
        """Return the body of an answer with status 200, None for any other or none in time."""
        request = httpx.Request("GET", under(url, path), headers=list(headers), extensions=_CHECK_TIMEOUT)
        body = bytearray()
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                response = await self._transport.handle_async_request(request)
                try:
                    async for part in response.aiter_raw():
                        body += part
                        if len(body) > _MAX_LIST_BYTES:
                            return None
                finally:
                    await response.aclose()
        except (httpx.HTTPError, TimeoutError):
            return None
        return bytes(body) if response.status_code == httpx.codes.OK else None


def _keys(headers: Headers) -> Headers:
    return [(name, value) for name in (b"authorization", b"x-api-key") if (value := header(headers, name))]


def under(url: httpx.URL, path: str, query: bytes = b"") -> httpx.URL:
    """Return the URL of a path (percent-encoded) below a base URL. ValueError: no URL has such a path or query."""
    raw = url.raw_path.rstrip(b"/") + path.encode("ascii") + (b"?" + query if query else b"")
    try:
        return url.copy_with(raw_path=raw)
    except httpx.InvalidURL as exc:
        raise ValueError(str(exc)) from exc
