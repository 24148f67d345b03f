"""A real daemon in a process of its own, which a target attacks, and a bystander: an engine with a pinned prompt.

After each input the daemon must be healthy and small. At the end the bystander reads back what it stored, the daemon
ends well, and its log has no traceback.
"""

import asyncio
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtier._pb import cache_pb2
from kvtier.client.address import channel_target
from kvtier.config import DaemonConfig
from kvtier.core.layout import ChunkKey
from tests.fakes.daemon_process import daemon_command, daemon_process
from tests.fakes.operator import Stub
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, wait_durable
from tests.fuzz.base import DaemonError

T = TypeVar("T")

SECRET_NAME, SECRET_OWNER = "bystander-prompt", "bystanders"
SECRET_TEXT, SECRET_SALT, SECRET_LABEL = "bystander-text-71d0", "bystander-salt-5f1c", "bystander-label-9a44"
SECRET_TOKENS = range(700_000, 700_080)
SECRET_KEYS = [chunk_key(("bystander", number)) for number in range(3)]
MAX_GROWTH_BYTES = 256 * 1024**2
CALL_S = 20.0
"""For an answer, on a busy machine."""


class StoredPrompt:
    """A durable prompt whose chunks an engine has stored; it can be stored again when an admin has changed it."""

    def __init__(self, config: DaemonConfig, keys: Sequence[ChunkKey], request: cache_pb2.PinRequest) -> None:
        """Take what is pinned, for a model of its own, and the keys of its chunks."""
        self._config, self.keys, self._request = config, keys, request
        self._before: Any = None
        self.engine = self._new_engine()

    @classmethod
    def of(cls, config: DaemonConfig, request: cache_pb2.PinRequest) -> "StoredPrompt":
        """Return one with three chunks of its own."""
        return cls(config, [chunk_key((request.name, number)) for number in range(3)], request)

    @classmethod
    def secret(cls, config: DaemonConfig) -> "StoredPrompt":
        """Return the bystander's."""
        request = cache_pb2.PinRequest(
            name=SECRET_NAME,
            tokens=SECRET_TOKENS,
            model="bystander",
            cache_salt=SECRET_SALT,
            recipe_json=json.dumps({"kind": "text", "text": SECRET_TEXT}),
            labels=cache_pb2.Labels(values={"label": SECRET_LABEL}),
            owner=SECRET_OWNER,
        )
        return cls(config, SECRET_KEYS, request)

    def _new_engine(self) -> ScriptedEngine:
        model = self._request.model
        return ScriptedEngine(
            self._config, fingerprint={"weights": model}, model_names=[model], engine_id=f"{model}-engine"
        )

    async def store(self, stub: Stub) -> None:
        """Attach the engine, pin, and store what the daemon does not hold."""
        await self.engine.__aenter__()
        pin_id = (await stub.Pin(self._request)).pin_id
        await self.engine.bind(pin_id, self.keys)
        await self.engine.store([key for key in self.keys if not self.engine.held.get(key)])
        await wait_durable(stub, self._request.name)
        self._before = await self._facts(stub)

    async def is_intact(self, stub: Stub) -> bool:
        """Return whether it is as `store` has left it."""
        return bool(await self._facts(stub) == self._before)

    async def touch(self, stub: Stub) -> None:
        """Change it into what it is, so that there is an event of it; nothing, if it is gone."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            labels = dict(self._request.labels.values)
            await stub.UpdatePrompt(cache_pb2.UpdatePromptRequest(name=self._request.name, set_labels=labels))

    async def store_again(self, stub: Stub) -> None:
        """Make it what it was, whatever was done to it."""
        # What was evicted from disk is being written again, perhaps. If it were dropped meanwhile, so would be what is
        # stored again before that ends.
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
            await asyncio.wait_for(wait_durable(stub, self._request.name), 2.0)
        namespace = cache_pb2.ReleaseNamespaceRequest(namespace_id=self.engine.welcome.namespace_id)
        await self.engine.__aexit__()
        await stub.ReleaseNamespace(namespace)
        name = self._request.name
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.Unpin(cache_pb2.UnpinRequest(name=name))
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.Evict(cache_pb2.EvictRequest(name=name, force=True))
        self.engine = self._new_engine()
        await self.store(stub)

    async def _facts(self, stub: Stub) -> Any:
        try:
            found = await stub.GetPrompt(cache_pb2.GetPromptRequest(name=self._request.name), timeout=CALL_S)
        except grpc.aio.AioRpcError as exc:
            return exc.code()
        kept = (found.pin_id, found.pinned, found.state, found.owner, found.ttl_s, found.priority, found.public)
        return (*kept, found.cache_salt, found.recipe_json, dict(found.labels), found.sliding)

    async def verify(self, *, is_whole: bool) -> None:
        """Raise if the engine reads back other bytes or, where all of it must be there, not all of it."""
        found = await self.engine.verify(10**6, self.keys)
        assert not is_whole or found == list(range(len(self.keys))), found
        await self.engine.__aexit__()


class AttackedDaemon:
    """Runs from the start to `close`."""

    def __init__(self, *options: str, environment: Sequence[str] = ()) -> None:
        """Start it with these flags, and variables as `NAME=VALUE`."""
        self.loop = asyncio.new_event_loop()
        self.peak_rss_mib, self._log_read = 0.0, 0
        self._stack = contextlib.ExitStack()
        folder = Path(tempfile.mkdtemp(prefix="kvtier-fuzz-"))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        self.config = config_in(folder, host_bytes=8 << 20)
        self.log = folder / "log"
        command = ["env", *environment, *daemon_command(self.config), *options]
        self._pid = self._stack.enter_context(daemon_process(command, self.log)).pid
        self.loop.run_until_complete(self._open())
        self._rss_before = self._rss()

    async def _open(self) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 << 20)]
        self.channel = grpc.aio.insecure_channel(channel_target(self.config.server.socket), options=options)
        self.stub, self._health = Stub(self.channel), health_pb2_grpc.HealthStub(self.channel)
        self.bystander = StoredPrompt.secret(self.config)
        await self.bystander.store(self.stub)

    def run(self, attack: Coroutine[Any, Any, T]) -> T:
        """Make an attack; raise DaemonError unless the daemon is healthy and small after it, and logged no
        traceback."""
        result = self.loop.run_until_complete(self._checked(attack))
        rss = self._rss()
        self.peak_rss_mib = max(self.peak_rss_mib, rss / 2**20)
        self._check_log()
        if rss - self._rss_before > MAX_GROWTH_BYTES:
            raise DaemonError(f"the daemon grew by {(rss - self._rss_before) >> 20} MiB")
        return result

    async def _checked(self, attack: Coroutine[Any, Any, T]) -> T:
        began_s = time.monotonic()
        result = await attack
        health = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
        if health.status != health_pb2.HealthCheckResponse.SERVING or time.monotonic() - began_s > CALL_S:
            raise DaemonError("the daemon is not healthy, or slow")
        return result

    def _check_log(self) -> None:
        """Raise if a traceback was logged since the last look."""
        with self.log.open() as log:
            log.seek(self._log_read)
            text = log.read()
            self._log_read = log.tell()
        if "Traceback" in text:
            raise DaemonError(f"{text.strip().splitlines()[-1]}\n{text[-5000:]}")

    def _rss(self) -> int:
        status = Path(f"/proc/{self._pid}/status").read_text()
        (kib,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(kib) * 1024

    def close(self, *, is_whole: bool) -> None:
        """Raise unless the daemon ends well and the bystander reads back what it stored: all, or what is left."""
        try:
            self.loop.run_until_complete(self._end(is_whole))
        finally:
            self._stack.close()
            self.loop.close()

    async def _end(self, is_whole: bool) -> None:
        async with asyncio.timeout(60):
            await self.bystander.verify(is_whole=is_whole)
            await self.channel.close(None)
        self._check_log()
