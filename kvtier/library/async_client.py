"""`kvtier.AsyncClient`: the methods of `Client` as coroutines."""

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from kvtier.library.client import Client
from kvtier.library.values.proof_values import Event
from kvtier.library.values.public_values import Prompt
from kvtier.library.watches import Watch

P = ParamSpec("P")
T = TypeVar("T")


def _in_thread(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate["AsyncClient", P], Coroutine[Any, Any, T]]:
    async def call(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(method, self._client, *args, **kwargs)

    functools.update_wrapper(call, method)
    return call


class AsyncClient:
    """`Client` for asyncio: the same methods with the same arguments, as coroutines; an async context manager.

    Each call runs `Client`'s method in a thread of asyncio's default executor; there is no asynchronous I/O beneath. So
    `on_progress` is called in that thread, and a call that is cancelled is not waited for, while its thread runs to
    its end: a pin that was sent is pinned. The iterators of `watch` and `watch_events`
    have a thread each, and end at once. `close` has one of its own, too, and ends calls that run.
    """

    def __init__(
        self,
        socket: Path | str | None = None,
        *,
        daemon_uid: int | None = None,
        timeout_s: float = 10.0,
        url: str | None = None,
        api_key: str | None = None,
        server: str | None = None,
        token: str | None = None,
        token_file: Path | str | None = None,
        ca_file: Path | str | None = None,
        client_cert_file: Path | str | None = None,
        client_key_file: Path | str | None = None,
    ) -> None:
        """See Client."""
        self._client = Client(
            socket,
            daemon_uid=daemon_uid,
            timeout_s=timeout_s,
            url=url,
            api_key=api_key,
            server=server,
            token=token,
            token_file=token_file,
            ca_file=ca_file,
            client_cert_file=client_cert_file,
            client_key_file=client_key_file,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; calls that run end with an error."""
        # In a thread of its own: those of the default executor may all be in calls that this ends.
        thread = ThreadPoolExecutor(1, thread_name_prefix="kvtier-close")
        try:
            await asyncio.get_running_loop().run_in_executor(thread, self._client.close)
        finally:
            thread.shutdown(wait=False)

    pin = _in_thread(Client.pin)
    adopt = _in_thread(Client.adopt)
    set = _in_thread(Client.set)
    explain = _in_thread(Client.explain)
    explain_request = _in_thread(Client.explain_request)
    recent_requests = _in_thread(Client.recent_requests)
    savings = _in_thread(Client.savings)
    remote = _in_thread(Client.remote)
    rename = _in_thread(Client.rename)
    apply = _in_thread(Client.apply)
    export_config = _in_thread(Client.export_config)
    list = _in_thread(Client.list)
    list_page = _in_thread(Client.list_page)
    get = _in_thread(Client.get)
    tokens = _in_thread(Client.tokens)
    chunks = _in_thread(Client.chunks)
    history = _in_thread(Client.history)
    rollback = _in_thread(Client.rollback)
    unpin = _in_thread(Client.unpin)
    evict = _in_thread(Client.evict)
    evict_all = _in_thread(Client.evict_all)
    warm = _in_thread(Client.warm)
    advise = _in_thread(Client.advise)
    status = _in_thread(Client.status)
    namespaces = _in_thread(Client.namespaces)
    fsck = _in_thread(Client.fsck)
    create_grant = _in_thread(Client.create_grant)
    grants = _in_thread(Client.grants)
    revoke_grant = _in_thread(Client.revoke_grant)
    export = _in_thread(Client.export)
    import_bundle = _in_thread(Client.import_bundle)
    verify = _in_thread(Client.verify)
    check_ready = _in_thread(Client.check_ready)
    wait_ready = _in_thread(Client.wait_ready)
    quarantine = _in_thread(Client.quarantine)
    release = _in_thread(Client.release)

    async def watch(self, name: str, *, timeout_s: float | None = None) -> AsyncIterator[Prompt]:
        """Yield a prompt as it is now, then again at each change; see Client.watch."""
        async with aclosing(_each(functools.partial(self._client.watch, name, timeout_s=timeout_s))) as prompts:
            async for prompt in prompts:
                yield prompt

    async def watch_events(self, *names: str, timeout_s: float | None = None) -> AsyncIterator[Event]:
        """Yield what the daemon does from now on; see Client.watch_events."""
        async with aclosing(_each(functools.partial(self._client.watch_events, *names, timeout_s=timeout_s))) as events:
            async for event in events:
                yield event


async def _each(open_watch: Callable[[], Watch[T]]) -> AsyncGenerator[T, None]:
    """Yield what a watch yields, which a thread waits for."""
    watch = await asyncio.to_thread(open_watch)
    # Of its own: watches that wait would take all threads of the default executor.
    thread = ThreadPoolExecutor(1, thread_name_prefix="kvtier-watch")
    try:
        loop = asyncio.get_running_loop()
        while (item := await loop.run_in_executor(thread, next, watch, None)) is not None:
            yield item
    finally:
        watch.close()
        thread.shutdown(wait=False)
