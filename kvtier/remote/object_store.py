"""A store in a bucket of S3 and what speaks like it, of Google Cloud Storage or of Azure, by obstore.

Credentials and endpoints come from the environment, under the names that the clouds' own tools use. A server on
loopback may be reached without TLS.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from enum import Enum, auto
from typing import Any, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from kvtier.core.loopback import is_loopback_host
from kvtier.errors import RemoteMissingError, RemoteRefusedError, RemoteStoreError, RemoteUnavailableError
from kvtier.printable import cut
from kvtier.remote.base import ObjectInfo, SmallObject, Version, check_small

T = TypeVar("T")

_TIMEOUT_S, _RETRY_S = 20, 30
"""Of a read that brings nothing, and of all tries of a request: a partition is noticed while an operator looks."""
_CALL_S = 2 * _RETRY_S + _TIMEOUT_S
"""Of a request with the bytes of its answer, and of a call: ranges that share a slow link take their time."""
_PART_BYTES = 8 * 1024**2
_STORES: dict[str, Callable[..., Any]] = {"s3": S3Store.from_url, "gs": GCSStore.from_url, "az": AzureStore.from_url}
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_REFUSED = (
    exceptions.PermissionDeniedError,
    exceptions.UnauthenticatedError,
    exceptions.InvalidPathError,
    exceptions.UnknownConfigurationKeyError,
    exceptions.NotSupportedError,
)
_REFUSALS = (
    "NoSuchBucket",
    "AccessDenied",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",  # this and the next with status 400: credentials that are valid for some hours
    "InvalidToken",
    "status: 403",
    "status: 401",
)


class _Tags(Enum):
    """How a store wants the ETag in `If-Match`."""

    UNKNOWN = auto()
    QUOTED = auto()
    """As it came, as HTTP has it."""
    BARE = auto()
    """Without its quotes: Ceph compares it with what it keeps, which has none, and refuses all others."""


class ObjectStore:
    """See RemoteStore."""

    def __init__(self, url: str) -> None:
        """Prepare; nothing is asked yet. RemoteRefusedError: the URL or the environment cannot be used."""
        self._url, scheme = url, url.partition("://")[0]
        self._tags = _Tags.UNKNOWN
        is_plain = scheme == "s3" and _is_plain_endpoint(url)
        options = {
            "timeout": timedelta(seconds=_CALL_S),
            "read_timeout": timedelta(seconds=_TIMEOUT_S),
            "allow_http": is_plain,
        }
        retries = {
            "max_retries": 6,
            "retry_timeout": timedelta(seconds=_RETRY_S),
            "backoff": {"max_backoff": timedelta(seconds=5)},
        }
        try:
            self._store = _STORES[scheme](url, client_options=options, retry_config=retries)
        except (exceptions.BaseError, ValueError, TypeError) as exc:
            raise RemoteRefusedError(url, "be used", cut(str(exc), 200)) from exc

    @property
    def url(self) -> str:
        """See RemoteStore."""
        return self._url

    async def get(self, key: str) -> SmallObject | None:
        """See RemoteStore."""

        async def read() -> SmallObject:
            found = await obstore.get_async(self._store, key)
            check_small(key, found.meta["size"])
            data = bytes(await found.bytes_async())
            return SmallObject(data=data, version=_version(found.meta))

        return await self._call(f"read {key}", read, missing=True)

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        """See RemoteStore."""

        async def read() -> bytes:
            return bytes(await obstore.get_range_async(self._store, key, start=start, end=end))

        data = await self._call(f"read {key}", read, missing=True)
        if data is None:
            raise RemoteMissingError(self._url, key)
        return data

    async def head(self, key: str) -> ObjectInfo | None:
        """See RemoteStore."""

        async def look() -> ObjectInfo:
            return _info(await obstore.head_async(self._store, key))

        return await self._call(f"look at {key}", look, missing=True)

    async def put_new(self, key: str, data: bytes) -> Version | None:
        """See RemoteStore."""
        return await self._put(key, data, "create")

    async def swap(self, key: str, data: bytes, replaces: Version) -> Version | None:
        """See RemoteStore."""
        mode = json.loads(replaces.text)
        if isinstance(self._store, GCSStore) and (mode := await self._generation(key, replaces)) is None:
            return None
        version = await self._put(key, data, _bare(mode) if self._tags is _Tags.BARE else mode)
        if version is None and self._tags is _Tags.UNKNOWN and await self._is_still(key, replaces):
            version = await self._put(key, data, _bare(mode))
            self._tags = _Tags.BARE if version is not None else self._tags
        elif version is not None and self._tags is _Tags.UNKNOWN:
            self._tags = _Tags.QUOTED
        return version

    async def _generation(self, key: str, version: Version) -> Any:
        """Return what Google's store compares in place of an ETag, and lists do not have; None: it is another one."""

        async def look() -> Any:
            return await obstore.head_async(self._store, key)

        found = await self._call(f"look at {key}", look, missing=True)
        return {"version": found["version"]} if found is not None and _version(found) == version else None

    async def _is_still(self, key: str, version: Version) -> bool:
        """Say whether an object is this version: then a store that says otherwise reads the condition otherwise."""
        found = await self.head(key)
        return found is not None and found.version == version

    async def _put(self, key: str, data: bytes, mode: Any) -> Version | None:
        async def write() -> Version | None:
            with suppress(exceptions.AlreadyExistsError, exceptions.PreconditionError, exceptions.NotModifiedError):
                return _version(await obstore.put_async(self._store, key, data, mode=mode, use_multipart=False))
            return None

        return await self._call(f"write {key}", write, missing=True)

    async def put_stream(self, key: str, pieces: AsyncIterator[bytes]) -> None:
        """See RemoteStore."""
        limit, failed = asyncio.timeout(_CALL_S), list[BaseException]()

        async def guarded() -> AsyncIterator[bytes]:
            """Only the time that the store takes for a piece counts: a bound of the bandwidth is in `pieces`."""
            try:
                async for piece in pieces:
                    _set_limit(limit, _CALL_S)
                    yield piece
                    _set_limit(limit, None)
            except GeneratorExit:  # the store has failed
                raise
            except BaseException as exc:
                failed.append(exc)
                raise
            _set_limit(limit, _CALL_S)

        async def write() -> None:
            source, first = guarded(), bytearray()
            async for piece in source:
                first += piece
                if len(first) >= _PART_BYTES:
                    parts = _joined(bytes(first), source)
                    await obstore.put_async(self._store, key, parts, chunk_size=_PART_BYTES, max_concurrency=2)
                    return
            await obstore.put_async(self._store, key, bytes(first), use_multipart=False)

        try:
            await self._call(f"write {key}", write, limit=limit)
        except RemoteStoreError:
            if failed:
                raise failed[0] from None
            raise

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """See RemoteStore."""
        pages = obstore.list(self._store, prefix=prefix.rstrip("/"), chunk_size=1000)

        async def take() -> Any:
            return await anext(pages, None)

        while (page := await self._call(f"list {prefix}", take)) is not None:
            for meta in page:
                if (info := _info(meta)).key.startswith(prefix):
                    yield info

    async def delete(self, key: str) -> None:
        """See RemoteStore."""

        async def drop() -> None:
            await obstore.delete_async(self._store, key)

        await self._call(f"delete {key}", drop, missing=True)

    async def close(self) -> None:
        """See RemoteStore."""

    async def _call(
        self,
        action: str,
        call: Callable[[], Awaitable[T]],
        *,
        missing: bool = False,
        limit: asyncio.Timeout | None = None,
    ) -> T | None:
        """Make a call, translate its errors; with `missing`, None says that there is no such object."""
        try:
            async with limit or asyncio.timeout(_CALL_S):
                return await call()
        except (FileNotFoundError, exceptions.NotFoundError) as exc:
            if missing and "NoSuchBucket" not in str(exc):
                return None
            raise RemoteRefusedError(self._url, action, _short(exc)) from exc
        except _REFUSED as exc:
            raise RemoteRefusedError(self._url, action, _short(exc)) from exc
        except exceptions.BaseError as exc:
            kind = RemoteRefusedError if any(word in str(exc) for word in _REFUSALS) else RemoteUnavailableError
            raise kind(self._url, action, _short(exc)) from exc
        except (TimeoutError, OSError) as exc:
            raise RemoteUnavailableError(self._url, action, _short(exc) or "no answer") from exc


def _is_plain_endpoint(url: str) -> bool:
    """Return whether the environment names a server without TLS, of this host.

    Raises:
        RemoteRefusedError: It names one of another host.
    """
    for name in _ENDPOINTS:
        endpoint = os.environ.get(name, "")
        parts = urlsplit(endpoint)
        if parts.scheme == "http":
            if not is_loopback_host(parts.hostname or ""):
                problem = f"{name}={endpoint} is not https, which is for servers on loopback only; give it TLS"
                raise RemoteRefusedError(url, "be used", problem)
            return True
    return False


def _set_limit(limit: asyncio.Timeout, seconds: float | None) -> None:
    if not limit.expired():
        limit.reschedule(None if seconds is None else asyncio.get_running_loop().time() + seconds)


async def _joined(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


def _bare(mode: Any) -> Any:
    return {**mode, "e_tag": mode["e_tag"].strip('"')} if "e_tag" in mode else mode


def _version(meta: Any) -> Version:
    """Return an object's ETag: what else names a version (of a bucket that keeps them, a generation) no list has."""
    name = "e_tag" if meta.get("e_tag") is not None else "version"
    return Version(json.dumps({name: meta.get(name)}))


def _info(meta: Any) -> ObjectInfo:
    return ObjectInfo(
        key=meta["path"],
        num_bytes=meta["size"],
        version=_version(meta),
        modified_unix_s=meta["last_modified"].timestamp(),
    )


def _short(exc: BaseException) -> str:
    """Return the first line of an error: more quotes requests and answers."""
    return cut((str(exc).strip() or type(exc).__name__).splitlines()[0], 300)
