"""Routers know of pinned prompts in host memory: as vLLM's own KV cache events, before any request.

The subscriber knows the wire format only, and nothing of kvtier or vLLM's types.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from tests.e2e.conftest import Note
from tests.e2e.harness import as_pinned, ask, forget_gpu, running_stack, tokens

BLOCK_TOKENS = 32
PREFIX = tokens(1, 10 * BLOCK_TOKENS)
TENANTS = tokens(2, 6 * BLOCK_TOKENS)
DEADLINE_S = 30.0


class Subscriber:
    """Collects what an engine publishes, as a router in another language sees it: events are maps in an array.

    Attributes:
        events: In their order.
    """

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self.events: list[dict[str, Any]] = []

    def wait(self, meets: Callable[[], bool], what: str) -> None:
        """Receive until a condition holds."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not meets():
            assert time.monotonic() < deadline_s, f"no {what}: {self.events}"
            if self._socket.poll(200):
                _topic, _number, payload = self._socket.recv_multipart()
                self.events += msgspec.msgpack.decode(payload)[1]

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
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 50)
    socket.connect(endpoint)
    try:
        yield Subscriber(socket)
    finally:
        socket.close(linger=0)
        context.term()


def published_at(path: Path) -> tuple[str, ...]:
    """Return the flags of an engine that publishes at a unix socket."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{path}"}
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
        # Another engine, idle: nobody has asked it anything.
        path = stack.home / "events.sock"
        with subscribed(f"ipc://{path}") as heard, stack.engine(extra_args=published_at(path)) as engine:
            stack.wait_attached(engine)
            prompt, tenants = as_pinned(PREFIX), as_pinned(TENANTS)

            def are_announced() -> bool:
                return bool(heard.of_prompt(prompt) and heard.of_prompt(tenants))

            heard.wait(are_announced, "announcement")
            (event,), (of_tenant,) = heard.of_prompt(prompt), heard.of_prompt(tenants)
            blocks, tenant_blocks = set(event["block_hashes"]), set(of_tenant["block_hashes"])
            assert not heard.blocks("BlockStored", "GPU")
            assert len(event["token_ids"]) == len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS == len(blocks) * BLOCK_TOKENS
            assert of_tenant["extra_keys"] == [["tenant"], *[None] * (len(tenant_blocks) - 1)]

            # What it names is what vLLM names, hash by hash, when requests have loaded it.
            ask(engine, prompt, max_tokens=1)
            ask(engine, tenants, cache_salt="tenant", max_tokens=1)
            heard.wait(lambda: blocks | tenant_blocks <= heard.blocks("BlockStored", "GPU"), "event of vLLM")

            # vLLM clears its cache, and routers forget all of the engine; they learn of it again while it is idle.
            heard.events.clear()
            forget_gpu(engine)
            heard.wait(are_announced, "repetition")
            assert heard.events[0]["type"] == "AllBlocksCleared"

            # It leaves host memory: what is on disk only is not announced, nor what is not pinned.
            stack.cli("evict", "prompt", "--tier", "host")
            heard.wait(lambda: blocks <= _removed_after_a_request(heard, engine), "removal")
            assert tenant_blocks.isdisjoint(heard.blocks("BlockRemoved", "CPU"))
            stack.cli("unpin", "tenants")
            heard.wait(lambda: tenant_blocks <= _removed_after_a_request(heard, engine), "removal")
            note(f"{len(blocks)} and {len(tenant_blocks)} blocks announced before any request")


def _removed_after_a_request(heard: Subscriber, engine: Engine) -> set[object]:
    """Events leave with a step of vLLM."""
    ask(engine, tokens(9, 40), max_tokens=1)
    return heard.blocks("BlockRemoved", "CPU")
