"""Each outcome that a request can have, made by a real request, and what the real CLI says of it.

The tests run in order, on one daemon and two engines one after the other: for the second one computing is taken to be
so fast that no load is worth it. Most outcomes need only what can happen to any installation: files that are damaged or
cannot be opened, a daemon that is stopped or killed, host memory for one chunk. For OVER_LIMIT the daemon's limit of
leases is lowered: four million chunks would take days. For SLOWER and NOT_PROMOTED the second engine has a
`prefill_tokens_per_s` that no machine reaches.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model, make_lora_adapter
from benchmarks.harness.process import wait_until
from benchmarks.harness.prompts import system_prompt
from kvtier._pb.cache_pb2 import TIER_HOST
from kvtier.core.limits import MAX_LEASED_CHUNKS
from kvtier.core.requests.request_outcomes import RequestOutcome
from tests.e2e.conftest import Note
from tests.e2e.harness import PATIENT, Stack, Tokens, forget_gpu, running_stack, tokens

BLOCK_TOKENS = 32
PREFIX, MORE, QUESTION = tokens(1, 10 * BLOCK_TOKENS), tokens(2, 4 * BLOCK_TOKENS), tokens(3, 40)
HOST_BYTES = 64 * 1024**2
HASTY = {"prefill_tokens_per_s": 10**9, "lookup_timeout_ms": 10_000}
TRIES_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that was answered.

    Attributes:
        request_id: As we chose it.
        pin: Name of the pin with which it is to be explained; may be empty.
        reported: The outcome as the answer says it; empty if it says nothing.
    """

    request_id: str
    pin: str
    reported: str


@dataclass
class World:
    """What the tests share.

    Attributes:
        adapter: Folder of a LoRA adapter that kvtier has never read.
        produced: Outcomes that were made, by their names.
    """

    stack: Stack
    engines: ExitStack
    engine: Engine
    adapter: Path
    produced: set[str] = field(default_factory=set)

    def ask(self, request_id: str, prompt: Tokens, *, pin: str = "", **params: Any) -> Asked:
        """Ask what vLLM itself has forgotten."""
        forget_gpu(self.engine)
        body = {"model": "model", "prompt": prompt, "max_tokens": 2, "kv_transfer_params": {"kvtier": {"report": True}}}
        answer = self.engine.http.post("/v1/completions", json=body | params, headers=_id(request_id))
        reported = (answer.raise_for_status().json().get("kv_transfer_params") or {}).get("kvtier") or {}
        return Asked(request_id=request_id, pin=pin, reported=reported.get("outcome") or "")

    def ask_until(
        self, outcome: RequestOutcome, prompt: Tokens, pin: str, prepare: Callable[[], None] = lambda: None
    ) -> Asked:
        """Prepare and ask, again and again until the answer says this outcome."""
        seen, ends_s = list[str](), time.monotonic() + TRIES_S
        while time.monotonic() < ends_s:
            prepare()
            asked = self.ask(f"{outcome}-{len(seen)}", prompt, pin=pin)
            if asked.reported == outcome:
                return asked
            seen.append(asked.reported)
        raise AssertionError(f"none was {outcome}: {seen}")

    def pin(self, name: str, prefix: Tokens) -> list[Path]:
        """Pin and store a prompt that no other test uses; return its packs."""
        before = set(self.stack.packs())
        self.stack.pin(name, prefix, self.engine)
        self.stack.wait_durable(name)
        return [pack for pack in self.stack.packs() if pack not in before]

    def pin_unstored(self, name: str, prefix: Tokens) -> None:
        """Pin a prompt before any request has brought it, and wait until the engine knows."""
        self.stack.pin(name, prefix, None, "--no-warm")
        self.stack.wait_attached(self.engine)

    @contextmanager
    def daemon_with(self, variable: str, value: int, usual: int) -> Iterator[None]:
        """Restart the daemon with another value of a field, and again with the usual one."""
        self._restart_daemon(variable, value)
        try:
            yield
        finally:
            self._restart_daemon(variable, usual)

    def _restart_daemon(self, variable: str, value: int) -> None:
        daemon = self.stack.daemon
        daemon.stop()
        daemon.set_variable(variable, str(value))
        daemon.start()
        self.stack.wait_attached(self.engine)

    def evict(self, name: str) -> None:
        """Drop a prompt from host memory; by no command, because that is done again and again."""
        with self.stack.admin() as client:
            client.evict(name, tier=TIER_HOST)

    def use_hasty_engine(self) -> None:
        """From now on ask an engine for which computing is taken to be very fast."""
        if self.engine.options.connector_config is not HASTY:
            self.engines.close()
            self.engine = self.engines.enter_context(self.stack.engine(connector_config=HASTY))
            self.stack.wait_attached(self.engine)

    def counts(self) -> Mapping[str, object]:
        """Return what every request that stores, loads or computes something changes."""
        text = self.engine.http.get("/metrics").text
        status = self.stack.status()
        return {
            "vLLM": [line for line in text.splitlines() if line.startswith("vllm:prompt_tokens")],
            "chunks": (status.host.num_chunks, status.disk.num_chunks),
            "acquires": status.counters["acquires"],
        }


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A daemon and an engine, with a pinned prompt in host memory."""
    adapter = tmp_path_factory.mktemp("adapter")
    make_lora_adapter(adapter, TINY, seed=1)
    options = EngineOptions(
        model=str(cached_model("tiny", TINY)),
        block_size=BLOCK_TOKENS,
        connector_config=PATIENT,
        extra_args=("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"adapter={adapter}"),
        extra_env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
    )
    settings = {"TUNED_HOST_HOST_BYTES": str(HOST_BYTES), "TUNED_LIMITS_MAX_LEASED_CHUNKS": str(MAX_LEASED_CHUNKS)}
    with running_stack(options, daemon_settings=settings) as stack, ExitStack() as engines:
        engine = engines.enter_context(stack.engine())
        stack.wait_attached(engine)
        stack.pin("prompt", PREFIX, engine)
        yield World(stack, engines, engine, adapter)


# Before it is sent: requests in files.


@pytest.fixture(scope="module")
def chat(world: World) -> str:
    """Pin a system prompt with a date in it; return the system prompt."""
    text = system_prompt(0)
    system = f"{text[:700]}\nToday is 2026-07-01.\n{text[700:1400]}"
    (world.stack.home / "system.md").write_text(system)
    world.stack.cli("pin", "chat", "--system", str(world.stack.home / "system.md"), "--url", world.engine.url)
    forget_gpu(world.engine)  # when this returns vLLM has counted the warm request too
    return system


def request_file(world: World, system: str, **fields: Any) -> Path:
    """Write a chat request."""
    turns = [{"role": "system", "content": system}, {"role": "user", "content": "Where is my order?"}]
    path = world.stack.home / "request.json"
    path.write_text(json.dumps({"model": "model", "messages": turns, "max_tokens": 2} | fields))
    return path


def test_a_chat_with_another_date(world: World, chat: str, note: Note) -> None:
    """Explained before it is sent: the prompt, the first token that differs, both texts; then it is what happens."""
    system = chat.replace("07-01", "07-02")
    path, before = str(request_file(world, system)), world.counts()
    explained = world.stack.json("explain", path, "--url", world.engine.url)
    text = world.stack.cli("explain", path, "--url", world.engine.url).stdout
    assert world.counts() == before, "nothing was computed, loaded or stored"
    (near, *_), difference = explained["explanation"]["prompts"], explained["difference"]
    assert (explained["explanation"]["outcome"], near["name"]) == ("DIVERGED", "chat")
    assert (difference["name"], difference["looks_like"]) == ("chat", "DATE")
    for side, date in (("in_request", "2026-07-02"), ("in_prompt", "2026-07-01")):
        assert f"Today is {date}" in difference["before"] + difference[side]
    for line in (f"token {near['differs_at']} is the first that differs", "This looks like a date"):
        assert line in " ".join(text.split())
    note(text)

    forget_gpu(world.engine)
    body = json.loads(Path(path).read_text())
    sent = world.engine.http.post("/v1/chat/completions", json=body, headers=_id("dated"))
    sent.raise_for_status()
    request = _explained(world, "dated")["explanation"]["request"]
    shared_tokens = near["differs_at"] // BLOCK_TOKENS * BLOCK_TOKENS
    assert (request["outcome"], request["pin_name"]) == ("DIVERGED", "chat")
    assert request["shared_tokens"] == request["host_tokens"] == shared_tokens


@pytest.mark.parametrize(
    ("fields", "outcome", "differs_in"),
    [
        ({}, "HIT", []),
        ({"cache_salt": "tenant"}, "UNKNOWN", ["cache_salt"]),
        ({"model": "adapter"}, "UNKNOWN", ["lora_name"]),
        ({"messages": None, "prompt": "Hello"}, "TOO_SHORT", None),
        ({"messages": None, "prompt": tokens(20, 100)}, "UNKNOWN", None),
    ],
    ids=["as pinned", "another salt", "an adapter", "too short", "unknown"],
)
def test_other_requests_in_files(
    world: World, chat: str, fields: Mapping[str, Any], outcome: str, differs_in: Sequence[str] | None
) -> None:
    path, before = str(request_file(world, chat, **fields)), world.counts()
    explained = world.stack.json("explain", path, "--url", world.engine.url)
    assert world.counts() == before
    assert explained["explanation"]["outcome"] == outcome
    assert explained["difference"] is None
    if differs_in is not None:
        near = explained["explanation"]["prompts"][0]
        assert (near["name"], near["differs_in"]) == ("chat", differs_in)
        assert all(field in explained["explanation"]["reason"] for field in differs_in)


# What each outcome takes. The docstrings are in the table that the test notes.


@contextmanager
def hit(world: World) -> Iterator[Asked]:
    """A pinned prompt that is in host memory."""
    yield world.ask("hit", PREFIX + QUESTION, pin="prompt")


@contextmanager
def part(world: World) -> Iterator[Asked]:
    """A longer version of a stored prompt was pinned, and no request has brought its rest yet."""
    world.pin_unstored("longer", PREFIX + MORE)
    yield world.ask("part", PREFIX + MORE + QUESTION, pin="longer")
    world.stack.cli("unpin", "longer")
    world.stack.cli("evict", "longer")


@contextmanager
def diverged(world: World) -> Iterator[Asked]:
    """Half of a pinned prompt, then other tokens."""
    yield world.ask("diverged", PREFIX[: len(PREFIX) // 2] + MORE, pin="prompt")


@contextmanager
def unknown(world: World) -> Iterator[Asked]:
    """Tokens that nothing was pinned of."""
    yield world.ask("unknown", tokens(10, 100))


@contextmanager
def too_short(world: World) -> Iterator[Asked]:
    """Less than one chunk."""
    yield world.ask("too_short", PREFIX[:20])


@contextmanager
def cache_skipped(world: World) -> Iterator[Asked]:
    """A request for log probabilities of its prompt."""
    yield world.ask("cache_skipped", PREFIX + QUESTION, pin="prompt", prompt_logprobs=1)


@contextmanager
def not_stored(world: World) -> Iterator[Asked]:
    """Pinned, then evicted by command."""
    world.pin("evicted", tokens(11, 6 * BLOCK_TOKENS))
    world.stack.cli("evict", "evicted", "--force")
    yield world.ask("not_stored", tokens(11, 6 * BLOCK_TOKENS) + QUESTION, pin="evicted")


@contextmanager
def adapter_not_ready(world: World) -> Iterator[Asked]:
    """The first request of a LoRA adapter that kvtier has never read."""
    yield world.ask("adapter_not_ready", PREFIX + QUESTION, model="adapter")


@contextmanager
def not_cacheable(world: World) -> Iterator[Asked]:
    """A LoRA adapter that was loaded in place of another one."""
    load = {"lora_name": "adapter", "lora_path": str(world.adapter), "load_inplace": True}
    world.engine.http.post("/v1/load_lora_adapter", json=load).raise_for_status()
    yield world.ask("not_cacheable", PREFIX + QUESTION, model="adapter")


@contextmanager
def load_failed(world: World) -> Iterator[Asked]:
    """On disk only, in a pack of which every page is damaged; the engine loads while the daemon still reads it."""
    prompt, seen = tokens(12, 6 * BLOCK_TOKENS), set(world.stack.packs())
    world.pin("damaged", prompt)

    def damage() -> None:
        world.stack.wait_durable("damaged")  # the request before may have stored it again
        world.evict("damaged")
        for pack in set(world.stack.packs()) - seen:
            _damage(pack)
            seen.add(pack)

    yield world.ask_until(RequestOutcome.LOAD_FAILED, prompt + QUESTION, "damaged", damage)


@contextmanager
def disk_off(world: World) -> Iterator[Asked]:
    """On disk only, in a pack that the system refuses to open; the fourth request at the latest finds the disk off."""
    packs = world.pin("unreadable", tokens(13, 6 * BLOCK_TOKENS))
    world.stack.cli("evict", "unreadable", "--tier", "host")
    with ExitStack() as repairs:
        for pack in packs:
            aside = pack.rename(pack.with_suffix(".aside"))
            repairs.callback(os.replace, aside, pack)
            pack.symlink_to(pack)  # ELOOP
        asked = world.ask_until(RequestOutcome.DISK_OFF, tokens(13, 6 * BLOCK_TOKENS) + QUESTION, "unreadable")
    wait_until(lambda: world.stack.counters()["disk_probes"] > 0, 60, "the disk to be probed")
    yield asked


@contextmanager
def late(world: World) -> Iterator[Asked]:
    """The daemon is stopped by SIGSTOP."""
    with _stopped(world):
        asked = world.ask("late", PREFIX + QUESTION, pin="prompt")
    yield asked


@contextmanager
def breaker_open(world: World) -> Iterator[Asked]:
    """The second request while the daemon is stopped."""
    with _stopped(world):
        world.ask("breaker-open-before", PREFIX + QUESTION)
        asked = world.ask("breaker_open", PREFIX + QUESTION, pin="prompt")
    yield asked


@contextmanager
def no_session(world: World) -> Iterator[Asked]:
    """The daemon was killed; it is reported to the one that is started after it, with the next request."""
    world.stack.daemon.kill()
    asked = world.ask("no_session", PREFIX + QUESTION)
    world.stack.daemon.start()
    world.stack.wait_attached(world.engine)
    world.ask("next", QUESTION)
    yield asked


@contextmanager
def over_limit(world: World) -> Iterator[Asked]:
    """The daemon leases fewer chunks to an engine than the prompt has."""
    with world.daemon_with("TUNED_LIMITS_MAX_LEASED_CHUNKS", 4, MAX_LEASED_CHUNKS):
        yield world.ask("over_limit", PREFIX + QUESTION, pin="prompt")


@contextmanager
def no_slot(world: World) -> Iterator[Asked]:
    """Host memory for one chunk, which the engine holds to store the next one."""
    row_bytes = world.stack.status().namespaces[0].row_bytes
    with world.daemon_with("TUNED_HOST_HOST_BYTES", 2 * row_bytes, HOST_BYTES):
        wait_until(lambda: sum(each.num_store_grants for each in world.stack.status().sessions) == 1, 60, "a credit")
        yield world.ask("no_slot", PREFIX + QUESTION, pin="prompt")


@contextmanager
def quarantined(world: World) -> Iterator[Asked]:
    """An operator has quarantined the namespace."""
    (namespace,) = world.stack.status().namespaces
    world.stack.cli("quarantine", namespace.namespace_id, "--reason", "a test")
    try:
        yield world.ask("quarantined", PREFIX + QUESTION, pin="prompt")
    finally:
        world.stack.cli("quarantine", namespace.namespace_id, "--release")


@contextmanager
def slower(world: World) -> Iterator[Asked]:
    """In host memory; some loads have shown that the engine computes it faster."""
    world.use_hasty_engine()
    world.pin("fast", tokens(14, 6 * BLOCK_TOKENS))
    prompt = tokens(14, 6 * BLOCK_TOKENS) + QUESTION
    asked = world.ask_until(RequestOutcome.SLOWER, prompt, "fast")
    _explained(world, asked.request_id)
    (path := world.stack.home / "tokens.json").write_text(json.dumps(prompt))
    # Only the engine knows what a load costs: what it reported last is shown beside what is held.
    coming = world.stack.json("explain", "--tokens", str(path))["explanation"]
    assert (coming["outcome"], coming["last_request"]["outcome"]) == ("HIT", "SLOWER")
    yield asked


@contextmanager
def not_promoted(world: World) -> Iterator[Asked]:
    """On disk only; the engine computes it faster than the disk is read, as the daemon has measured it before."""
    world.use_hasty_engine()
    world.pin("cold", tokens(15, 6 * BLOCK_TOKENS))

    def evict() -> None:
        world.evict("cold")

    yield world.ask_until(RequestOutcome.NOT_PROMOTED, tokens(15, 6 * BLOCK_TOKENS) + QUESTION, "cold", evict)


# The hasty engine comes last.
SCENARIOS: Sequence[Callable[[World], AbstractContextManager[Asked]]] = (
    hit,
    part,
    diverged,
    unknown,
    too_short,
    cache_skipped,
    not_stored,
    adapter_not_ready,
    not_cacheable,
    load_failed,
    disk_off,
    late,
    breaker_open,
    no_session,
    over_limit,
    no_slot,
    quarantined,
    slower,
    not_promoted,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_an_outcome(world: World, note: Note, scenario: Callable[[World], AbstractContextManager[Asked]]) -> None:
    """In the answer, in the list of recent requests, and explained by its id."""
    outcome = RequestOutcome(scenario.__name__)
    with scenario(world) as asked:
        assert asked.reported == outcome
        explained = _explained(world, asked.request_id)
        recent = world.stack.json("explain", "--recent", "--outcome", outcome, "--limit", "4096")
        text = world.stack.cli("explain", "--id", asked.request_id).stdout
    request = explained["explanation"]["request"]
    assert explained["explanation"]["outcome"] == request["outcome"] == outcome.name
    assert request["pin_name"] == asked.pin
    assert [each for each in recent if asked.request_id in each["request_id"]] == [request]
    assert text.startswith(f"outcome  {outcome}: {explained['explanation']['reason']}")
    restored = request["device_tokens"] + request["host_tokens"] + request["disk_tokens"]
    assert bool(restored) == (outcome in (RequestOutcome.HIT, RequestOutcome.PART, RequestOutcome.DIVERGED))
    world.produced.add(outcome)
    note(f"{scenario.__doc__} -> {text.splitlines()[0].strip()}")


def test_every_outcome_was_produced(world: World) -> None:
    assert world.produced == {each.value for each in RequestOutcome}


def _id(request_id: str) -> dict[str, str]:
    return {"X-Request-Id": request_id}


def _explained(world: World, request_id: str) -> Any:
    """Explain a request as soon as the engine has reported it."""
    found: list[Any] = []

    def is_reported() -> bool:
        done = world.stack.run("explain", "--id", request_id, "--json")
        if done.returncode == 0:
            found.append(json.loads(done.stdout))
        return bool(found)

    wait_until(is_reported, 60, f"{request_id} to be reported")
    return found[0]


def _damage(pack: Path) -> None:
    """Flip a bit in every kilobyte."""
    data = bytearray(pack.read_bytes())
    for offset in range(512, len(data), 1024):
        data[offset] ^= 1
    pack.write_bytes(data)


@contextmanager
def _stopped(world: World) -> Iterator[None]:
    """Stop the daemon, and wait afterwards until lookups are answered again."""
    world.stack.daemon.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        world.stack.daemon.signal(signal.SIGCONT)
    wait_until(lambda: world.ask("again", PREFIX + QUESTION).reported == RequestOutcome.HIT, 60, "hits again")
