"""Routers know of pinned prompts in host memory: as vLLM's own KV cache events, before any request.

The subscriber knows the wire format only, and nothing of kvtier or vLLM's types; what llm-d and AIBrix make of the
messages is asked too.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import Process, free_port, wait_until
from tests.e2e.conftest import Note
from tests.e2e.harness import as_pinned, ask, forget_gpu, running_stack, tokens
from tests.subscribers.aibrix_gateway import ProposedAibrixGateway
from tests.subscribers.llmd_router import LlmdRouter
from tests.subscribers.wire import NUMBER_BYTES, AskedPrompt, Message, RouterIndex

BLOCK_TOKENS = 32
POD = "engine"
PREFIX = tokens(1, 10 * BLOCK_TOKENS)
TENANTS = tokens(2, 6 * BLOCK_TOKENS)
DEADLINE_S = 60
END_OF_REPLAY = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)


class Subscriber:
    """Collects what an engine publishes, as a router in another language sees it: events are maps in an array.

    Attributes:
        events: In their order.
        indexes: What routers make of the messages.
        num_messages: The number of the next message.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", replay: "zmq.Socket[bytes]") -> None:
        self._socket, self._replay = socket, replay
        self.num_messages = 0
        self.events: list[dict[str, Any]] = []
        self.indexes: Sequence[RouterIndex] = (LlmdRouter(BLOCK_TOKENS), ProposedAibrixGateway(BLOCK_TOKENS))

    def wait(self, meets: Callable[[], bool], what: str) -> None:
        """Receive until a condition holds."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not meets():
            assert time.monotonic() < deadline_s, f"no {what}: {self.events}"
            if self._socket.poll(200):
                self._take(Message(*self._socket.recv_multipart()))
            else:
                self._catch_up()

    def _take(self, message: Message) -> None:
        number = int.from_bytes(message.number, "big")
        if number > self.num_messages:
            self._catch_up()
        if number == self.num_messages:
            self.num_messages += 1
            self.events += msgspec.msgpack.decode(message.payload)[1]
            for index in self.indexes:
                index.receive(POD, message)

    def _catch_up(self) -> None:
        """Have the engine send again what it sent before our subscription had reached it, as routers do."""
        self._replay.send_multipart((b"", self.num_messages.to_bytes(NUMBER_BYTES, "big")))
        while True:
            assert self._replay.poll(DEADLINE_S * 1000), "no replay"
            *_, number, payload = self._replay.recv_multipart()
            if number == END_OF_REPLAY:
                return
            self._take(Message(b"", number, payload))

    def blocks(self, kind: str, medium: str) -> set[object]:
        """Hashes that were stored in, or removed from, a medium."""
        events = [each for each in self.events if (each["type"], each.get("medium")) == (kind, medium)]
        return {block for event in events for block in event["block_hashes"]}

    def of_prompt(self, prompt: list[int]) -> list[dict[str, Any]]:
        """Events that announce a prompt in host memory, from its root."""
        stored = [each for each in self.events if (each["type"], each.get("medium")) == ("BlockStored", "CPU")]
        roots = [each for each in stored if each["parent_block_hash"] is None]
        return [each for each in roots if each["token_ids"] == prompt[: len(each["token_ids"])]]


@contextmanager
def subscribed(endpoint: str) -> Iterator[Subscriber]:
    """Subscribe; the engine may be started later."""
    context = zmq.Context()
    socket, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 50)
    socket.connect(endpoint)
    replay.connect(f"{endpoint}.replay")
    try:
        yield Subscriber(socket, replay)
    finally:
        socket.close(linger=0)
        replay.close(linger=0)
        context.term()


def published_at(path: Path) -> tuple[str, ...]:
    """Return the flags of an engine that publishes at a unix socket."""
    endpoint = f"ipc://{path}"
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    config["replay_endpoint"] = f"{endpoint}.replay"
    return ("--kv-events-config", msgspec.json.encode(config).decode())


def test_pins_in_host_memory_are_announced_before_any_request_and_until_they_leave(note: Note) -> None:
    options = EngineOptions(model=str(cached_model("tiny", TINY)), block_size=BLOCK_TOKENS)
    with running_stack(options) as stack:
        with stack.engine() as engine:
            stack.wait_attached(engine)
            stack.pin("prompt", PREFIX, engine)
            stack.pin("tenants", TENANTS, engine, "--cache-salt", "tenant")
            stack.wait_durable("prompt")
            stack.wait_durable("tenants")
        # Another engine, idle: no request has come to it.
        path = stack.home / "events.sock"
        with subscribed(f"ipc://{path}") as subscriber, stack.engine(extra_args=published_at(path)) as engine:
            stack.wait_attached(engine)
            prompt, tenants = as_pinned(PREFIX), as_pinned(TENANTS)

            def are_announced() -> bool:
                return bool(subscriber.of_prompt(prompt) and subscriber.of_prompt(tenants))

            subscriber.wait(are_announced, "announcement")
            (event,), (of_tenant,) = subscriber.of_prompt(prompt), subscriber.of_prompt(tenants)
            blocks, tenant_blocks = set(event["block_hashes"]), set(of_tenant["block_hashes"])
            assert not subscriber.blocks("BlockStored", "GPU")
            assert len(event["token_ids"]) == len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS == len(blocks) * BLOCK_TOKENS
            assert of_tenant["extra_keys"] == [["tenant"], *[None] * (len(tenant_blocks) - 1)]
            for index in subscriber.indexes:
                assert index.num_blocks(AskedPrompt(tokens=prompt, model="")) == {POD: len(blocks)}

            # What it names is what vLLM names, hash by hash, when requests have loaded it.
            ask(engine, prompt, max_tokens=1)
            ask(engine, tenants, cache_salt="tenant", max_tokens=1)
            subscriber.wait(lambda: blocks | tenant_blocks <= subscriber.blocks("BlockStored", "GPU"), "event of vLLM")

            # vLLM clears its cache, and routers forget all of the engine; they learn of it again while it is idle.
            subscriber.events.clear()
            forget_gpu(engine)
            subscriber.wait(are_announced, "repetition")
            assert subscriber.events[0]["type"] == "AllBlocksCleared"
            for index in subscriber.indexes:
                assert index.num_blocks(AskedPrompt(tokens=prompt, model="")) == {POD: len(blocks)}

            # It leaves host memory while the engine is idle: what is on disk only is not announced, nor what is not
            # pinned.
            stack.cli("evict", "prompt", "--tier", "host")
            subscriber.wait(lambda: blocks <= subscriber.blocks("BlockRemoved", "CPU"), "removal")
            for index in subscriber.indexes:
                assert not index.num_blocks(AskedPrompt(tokens=prompt, model=""))
            assert tenant_blocks.isdisjoint(subscriber.blocks("BlockRemoved", "CPU"))
            stack.cli("unpin", "tenants")
            subscriber.wait(lambda: tenant_blocks <= subscriber.blocks("BlockRemoved", "CPU"), "removal")
            note(f"{len(blocks)} and {len(tenant_blocks)} blocks announced before any request")


class Router(Process):
    """A `vllm-router` with its policy by KV cache events, on a free port of loopback."""

    def __init__(self, engines: Mapping[str, str], log_path: Path) -> None:
        """`engines`: where each publishes, by its URL."""
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        argv = [sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        argv += ["--policy", "kv_aware", "--kv-event-model", "model", "--kv-event-block-size", str(BLOCK_TOKENS)]
        argv += ["--log-level", "debug", "--worker-startup-check-interval", "1", "--worker-urls", *engines]
        for url, endpoint in engines.items():
            argv += ["--kv-event-source", f"{url}={endpoint}"]
        super().__init__("vllm-router", argv, {}, log_path)

    def start(self) -> None:
        """Start it and wait until it answers."""
        super().start()
        self.wait_ready(self._answers, 60)

    def has_received(self, engine: Engine) -> bool:
        """Return whether events of an engine have come."""
        lines = self.log_path.read_text().splitlines()
        return any("live sequence advanced" in line and engine.url in line for line in lines)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False


@contextmanager
def on_loopback(source: str) -> Iterator[str]:
    """Pass what is published at a unix socket on to a port of loopback: vLLM binds TCP to every address only."""
    context = zmq.Context()
    incoming, outgoing = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    incoming.connect(source)
    outgoing.bind(endpoint := f"tcp://127.0.0.1:{free_port()}")

    def forward() -> None:
        with suppress(zmq.ContextTerminated):
            zmq.proxy(incoming, outgoing)
        for each in (incoming, outgoing):
            each.close(linger=0)

    thread = threading.Thread(target=forward)
    thread.start()
    try:
        yield endpoint
    finally:
        context.term()
        thread.join()


def test_a_router_sends_the_first_request_to_the_engine_whose_daemon_has_the_prompt(note: Note) -> None:
    """Two hosts, each with a pinned prompt in host memory and nothing on its engine; the router is not ours."""
    pytest.importorskip("vllm_router")
    options = EngineOptions(model=str(cached_model("tiny", TINY)), block_size=BLOCK_TOKENS)
    with running_stack(options) as one, running_stack(options) as two, ExitStack() as running:
        urls: dict[str, str] = {}
        engines: list[Engine] = []
        for stack, prefix in ((one, PREFIX), (two, TENANTS)):
            path = stack.home / "events.sock"
            engine = running.enter_context(stack.engine(extra_args=published_at(path)))
            stack.wait_attached(engine)
            stack.pin("prompt", prefix, engine)
            stack.wait_durable("prompt")
            urls[engine.url] = running.enter_context(on_loopback(f"ipc://{path}"))
            engines.append(engine)
        router = running.enter_context(Router(urls, one.home / "router.log"))

        def is_known(engine: Engine) -> bool:
            forget_gpu(engine)  # vLLM publishes that, and what is left in host memory
            return router.has_received(engine)

        for engine in engines:
            wait_until(partial(is_known, engine), DEADLINE_S, "events of an engine at the router")
        for number, prefix in ((1, TENANTS), (0, PREFIX)):
            before = [_by_source(engine) for engine in engines]
            body = {"model": "model", "prompt": as_pinned(prefix), "max_tokens": 1}
            httpx.post(f"{router.url}/v1/completions", json=body, timeout=60).raise_for_status()
            own, other = engines[number], engines[1 - number]
            assert _by_source(other) == before[1 - number], "it was not asked"
            restored = _by_source(own)["host"] - before[number]["host"]
            assert restored == len(as_pinned(prefix)) // BLOCK_TOKENS * BLOCK_TOKENS
            note(f"the first request went to the engine that has its prompt, and was restored {restored:.0f} tokens")


def _by_source(engine: Engine) -> dict[str, float]:
    """Return what of prompts the engine has had from where."""
    computed = engine.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
    return {**engine.cached_by_source(), "computed": computed}
