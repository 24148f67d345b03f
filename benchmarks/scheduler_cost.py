"""CPU time that the connector costs vLLM's scheduler, per step and per request, beside vLLM's own offloading connector.

usage: python -m benchmarks.scheduler_cost [--rounds 200] [--pins 0,100,10000]

vLLM's OffloadingConnectorScheduler runs underneath in both columns, driven through the calls of one request's life as
the scheduler makes them (stand-ins for requests and blocks: tests/unit/connector/harness.py). `vLLM` has a manager that
holds no chunk and answers MISS; `kvtier` is the real one. The benchmark plays its session, so no I/O is counted. Thread
CPU time; the two take turns in one run.

`judge and report` is what a request's outcome costs: to find the pin that it begins with, to judge, and to report it.

Then, requests with a salt beside public prompts: what it costs to find out with which one such a request begins, and to
be restored it.

The last lines are of prompts that are found by themselves: what the scheduler's thread pays to have a request of
100,000 tokens looked at, and what looking at it costs the thread that does.
"""

import argparse
import itertools
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Collection
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.v1.kv_offload.base import (
        LookupResult,
        OffloadingManager,
        OffloadPolicy,
        PrepareStoreOutput,
        RequestOffloadingContext,
    )
    from vllm.v1.utils import ConstantList

import pytest

from benchmarks.measuring.machine import machine_line
from kvtier._pb import engine_pb2 as pb
from kvtier.client.engine_session import Attachment
from kvtier.client.outbox import Outbox
from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier_connector.discovery import PromptObserver
from kvtier_connector.discovery.chat_rendering import ChatRenderer, NoUserTurnError
from kvtier_connector.discovery.observed_requests import ChunkShape, ObservedRequest, RequestQueue
from kvtier_connector.discovery.request_reader import RequestReader, TemplateKnowledge
from kvtier_connector.engine.chunk_keys import GroupShape
from kvtier_connector.engine.public_prompts import PublicPrompt, PublicPrompts, pack_tokens
from kvtier_connector.engine.transfer_job import ArenaSpec
from kvtier_connector.scheduler.manager import judge
from kvtier_connector.scheduler.request_state import RequestState
from kvtier_connector.session.daemon_events import PinBound
from kvtier_connector.session.pin_binder import BoundPin
from tests.unit.connector.harness import BLOCK_TOKENS, Scheduler, hashes_of

PUBLIC_PROMPTS = (1, 100, 1000)
PUBLIC_TOKENS = (2048, 8192, 32_768)
PUBLIC_BLOCK_TOKENS = 16
PROMPT_CHUNKS = 94
QUESTION_CHUNKS = 6
NUM_RUNNING = (16, 256)
STEPS_PER_ROUND = 20
LONG_PROMPT_TOKENS = 100_000
SYSTEM_TOKENS = 4000
NUM_LONG = 32
HOST = pb.ChunkResidency.HOST


class NothingHeld(OffloadingManager):
    """A manager that does nothing: the rest is vLLM's own cost."""

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        return LookupResult.MISS

    def prepare_load(self, keys: Collection[Any], req_context: Any) -> ArenaSpec:
        raise NotImplementedError

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> PrepareStoreOutput:
        spec = ArenaSpec(req_id="", arena_id=b"", arena_path="", lock_path="", useful_bytes=(), chunks=())
        return PrepareStoreOutput([], spec, [])

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)


class StoresAll(NothingHeld):
    """A manager that takes every chunk and does nothing with it: vLLM's own cost of storing."""

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> PrepareStoreOutput:
        return PrepareStoreOutput(list(keys), super().prepare_store(keys, req_context).store_spec, [])

    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        pass


class ConnectorSide:
    """One connector and the calls on it.

    Args:
        patch: For the harness.
        num_pins: Pinned prompts, all of them held.
        ours: kvtier's, else vLLM's.
        num_held: Storing every prompt: chunks that the daemon holds, those of the prompt `held` among them.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, num_pins: int = 0, ours: bool, num_held: int = 0) -> None:
        self.scheduler: Any = Scheduler(patch, num_credits=8)
        self.scheduler._block_ids = itertools.count(1)
        self.connector: Any = self.scheduler.connector
        self.kind = type(self.connector) if ours else OffloadingConnector
        if not ours:
            self.connector.connector_scheduler.manager = StoresAll() if num_held else NothingHeld()
            object.__setattr__(self.connector, "_manager", _Silent())
            decoding: Any = self.connector._decoding
            decoding._is_on = False
        else:
            self.scheduler.attach(0, pb.STORE_ALL if num_held else pb.STORE_PINNED)
            if num_held:
                self.scheduler.hold([key + bytes(4) for key in hashes_of("held", PROMPT_CHUNKS)])
                self.scheduler.hold([key + bytes(4) for key in hashes_of("crowd", num_held)], complete=True)
            for number in range(num_pins):
                keys = [key + bytes(4) for key in hashes_of(f"pin{number}", PROMPT_CHUNKS)]
                self.scheduler.pin(keys, pin_id=f"pin{number}")
        self._serial = 0
        self.num_stored = 0  # chunks that the last request stored

    def give_credits(self) -> None:
        """Give slots for one whole prompt: a quarter of the standing credits is kept from unpinned chunks."""
        stores = self.scheduler.manager.stores
        num_missing = 2 * (PROMPT_CHUNKS + QUESTION_CHUNKS) - len(stores._credits)
        slots = [pb.SlotRef(slot=slot, generation=1) for slot in range(num_missing)]
        self.scheduler.say(pb.DaemonMessage(store_credits=pb.StoreCredits(slots=slots)))
        self.scheduler.step()  # takes them in

    def request(self, name: str) -> Any:
        """Make a request; its hashes exist before the clock runs, as vLLM computes them anyway."""
        self._serial += 1
        return _request(f"r{self._serial}", name)

    def pin_public(self, name: str) -> None:
        """Pin a public prompt that is held."""
        hashes = tuple(hashes_of(name, PROMPT_CHUNKS))
        keys = tuple(key + bytes(4) for key in hashes)
        prompt = PublicPrompt(
            adapter=("", ""), tokens=pack_tokens(_tokens(PROMPT_CHUNKS)), hashes=hashes, tokens_per_hash=BLOCK_TOKENS
        )
        bound = BoundPin(pin_id=name, keys=keys, pinned=True, public=prompt)
        self.scheduler.link.events.append(PinBound(self.scheduler.link.live, bound))
        self.scheduler.hold(keys)
        self.scheduler.step()

    def life(self, request: Any, *, hit: bool = False) -> None:
        """All calls for one request."""
        scheduler, kind, connector = self.scheduler, self.kind, self.connector
        kind.on_new_request(connector, request)
        matched, _ = kind.get_num_new_matched_tokens(connector, request, 0)
        if hit:
            (acquire,) = [m.acquire for m in scheduler.sent() if m.WhichOneof("kind") == "acquire"]
            scheduler.answer(acquire, [HOST] * PROMPT_CHUNKS)
            matched, _ = kind.get_num_new_matched_tokens(connector, request, 0)
            assert matched == PROMPT_CHUNKS * BLOCK_TOKENS
        block_ids = scheduler.allocate(request, 0, matched)
        meta = scheduler.step(new=[(request, block_ids)])
        scheduler.workers_report([*meta.load_jobs, *meta.store_jobs])
        scheduler.finish(request)
        scheduler.sent()
        self.num_stored = sum(len(job.dst_spec.chunks) for job in meta.store_jobs.values())


class _Silent:
    """Replaces kvtier's manager, so that the harness's calls cost nothing on vLLM's side."""

    host_events = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args: None


def _request(req_id: str, name: str) -> Any:
    from tests.unit.connector.harness import FakeRequest

    hashes = hashes_of(name, PROMPT_CHUNKS) + hashes_of(req_id, QUESTION_CHUNKS)
    return FakeRequest(req_id, hashes, len(hashes) * BLOCK_TOKENS + 1)


def _tokens(num_blocks: int) -> list[int]:
    return [number for number in range(num_blocks) for _ in range(BLOCK_TOKENS)]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--pins", default="0,100,10000", help="numbers of pinned prompts; default: %(default)s")
    arguments = parser.parse_args()
    rounds, pins = arguments.rounds, [int(number) for number in arguments.pins.split(",")]
    print(machine_line())
    print(f"prompt of {PROMPT_CHUNKS} + {QUESTION_CHUNKS} chunks; medians of {rounds} rounds, thread CPU time")
    with pytest.MonkeyPatch.context() as patch:
        for num_pins in pins:
            sides = {
                "vLLM": ConnectorSide(patch, num_pins=0, ours=False),
                "kvtier": ConnectorSide(patch, num_pins=num_pins, ours=True),
            }
            _print(f"{num_pins} pins: request that matches no pin", _requests(sides, rounds, "other"))
            for num_running in NUM_RUNNING:
                title = f"{num_pins} pins: step with {num_running} running requests"
                _print(title, _steps(sides, rounds, num_running))
            _print(f"{num_pins} pins: judge and report an outcome", _outcomes(sides["kvtier"], rounds, num_pins))
        ours = {"kvtier": sides["kvtier"]}
        if num_pins:
            title = f"{num_pins} pins: request restored from the host tier"
            _print(title, _requests(ours, rounds, f"pin{num_pins // 2}", hit=True))
        for num_held in (1000, 200_000):
            sides = {
                "vLLM": ConnectorSide(patch, ours=False),
                "kvtier": ConnectorSide(patch, ours=True, num_held=num_held),
            }
            storing = {"vLLM": ConnectorSide(patch, ours=False, num_held=num_held), "kvtier": sides["kvtier"]}
            title = f"all, {num_held} held: "
            _print(title + "nothing matches, no slots", _requests(sides, rounds, "other"))
            _print(title + "94 chunks restored", _requests({"kvtier": sides["kvtier"]}, rounds, "held", hit=True))
            _print(title + "nothing matches, all 100 stored", _requests(storing, rounds, "", store=True))
        side = ConnectorSide(patch, ours=True, num_pins=1)
        side.pin_public("public")
        for salt, name in (("", "pin0"), ("tenant", "salted")):
            title = f"94 chunks restored, {'of a public prompt, with a salt' if salt else 'without a salt'}"
            _print(title, _requests({"kvtier": side}, rounds, name, hit=True, salt=salt))
    for num_prompts, num_tokens in itertools.product(PUBLIC_PROMPTS, PUBLIC_TOKENS):
        _print(f"{num_prompts} public prompts of {num_tokens} tokens", _find_public(rounds, num_prompts, num_tokens))
    _print("request of 100,000 tokens: in the scheduler", _observed_in_scheduler(rounds))
    _print("request of 100,000 tokens: in its own thread", _observed_in_thread(rounds))


def _outcomes(side: ConnectorSide, rounds: int, num_pins: int) -> dict[str, list[float]]:
    """Time what the scheduler's thread pays for a request's outcome, beside its lookup."""
    manager, samples = side.scheduler.manager, dict[str, list[float]]()
    names = {"no pin": "other"} | ({"a whole pin": f"pin{num_pins // 2}", "half a pin": ""} if num_pins else {})
    for label, name in names.items():
        samples[label] = []
        for _ in range(rounds):
            request = side.request(name or f"pin{num_pins // 2}")
            if not name:
                half = PROMPT_CHUNKS // 2
                request.block_hashes[half:] = hashes_of("half", len(request.block_hashes) - half)
            state = RequestState(req_id=request.request_id)
            state.account.lookup = RequestOutcome.HIT
            began_s = time.thread_time()
            judge(state, request, 0, manager._planner, has_session=True)
            manager._outcomes.ended(request, state.account)
            samples[label].append(time.thread_time() - began_s)
            assert state.account.outcome is not None
        side.scheduler.sent()
    return samples


def _find_public(rounds: int, num_prompts: int, num_tokens: int) -> dict[str, list[float]]:
    """Time what a request with a salt costs before anything is asked; the prompts differ in their last block only."""
    tokens = [50_000 + number * 7919 % 60_000 for number in range(num_tokens)]
    hashes = tuple(hashes_of("public", num_tokens // PUBLIC_BLOCK_TOKENS))
    public, ids = PublicPrompts(), tokens
    for number in range(num_prompts):
        ids = [*tokens[:-PUBLIC_BLOCK_TOKENS], *[number] * PUBLIC_BLOCK_TOKENS]
        prompt = PublicPrompt(
            adapter=("", ""), tokens=pack_tokens(ids), hashes=hashes, tokens_per_hash=PUBLIC_BLOCK_TOKENS
        )
        public.add(f"p{number}", prompt)
    half = num_tokens // 2
    requests = {"nothing of one": [*tokens[1:], 1], "half of one": [*tokens[:half], *tokens[:half]], "a whole one": ids}
    samples: dict[str, list[float]] = {}
    for (label, of_request), num_shared in zip(requests.items(), (0, len(hashes) // 2, len(hashes)), strict=True):
        request = _request("r", "salted")
        request.block_hashes, request.all_token_ids = list(hashes), ConstantList([*of_request, *tokens[:500]])
        assert len(public.find(request).unsalted) == num_shared
        samples[label] = []
        for _ in range(rounds):
            began_s = time.thread_time()
            public.find(request)
            samples[label].append(time.thread_time() - began_s)
    return samples


def _requests(
    sides: dict[str, ConnectorSide],
    rounds: int,
    name: str,
    *,
    hit: bool = False,
    store: bool = False,
    salt: str = "",
) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for label, side in sides.items():
            # Each stored prompt is new: a repeated one would find its chunks being stored.
            request = side.request(name or f"new{number}-")
            if salt:
                request.cache_salt = salt
                request.all_token_ids = ConstantList(_tokens(PROMPT_CHUNKS + QUESTION_CHUNKS))
            if store and label == "kvtier":
                side.give_credits()
            began_s = time.thread_time()
            side.life(request, hit=hit)
            samples[label].append(time.thread_time() - began_s)
            if store and label == "kvtier":
                assert side.num_stored == PROMPT_CHUNKS + QUESTION_CHUNKS
    return samples


def _steps(sides: dict[str, ConnectorSide], rounds: int, num_running: int) -> dict[str, list[float]]:
    running: dict[str, list[Any]] = {}
    for label, side in sides.items():
        running[label] = [side.request("other") for _ in range(num_running)]
        for request in running[label]:
            side.kind.on_new_request(side.connector, request)
            side.kind.get_num_new_matched_tokens(side.connector, request, 0)
            request.num_computed_tokens = request.num_tokens - 1
        side.scheduler.step(new=[(request, list(range(1, 102))) for request in running[label]])
    samples: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for label, side in sides.items():
            began_s = time.thread_time()
            for _ in range(STEPS_PER_ROUND):
                side.scheduler.step(running=running[label])
                side.scheduler.workers_report([])
            samples[label].append((time.thread_time() - began_s) / STEPS_PER_ROUND)
    return samples


GROUPS = (GroupShape(group_idx=0, chunk_tokens=16, hashes_per_chunk=1, window_chunks=0),)
OPENING = (900_000, 900_001)


def _long_request(system: int, user: int, *, has_turn: bool = True) -> Any:
    """Return as much of vLLM's request as is read; its tokens are objects of their own, as vLLM's are."""
    from types import SimpleNamespace

    opening = OPENING if has_turn else (1, 1)
    tokens = [*range(system, system + SYSTEM_TOKENS), *opening]
    tokens += range(user, user + LONG_PROMPT_TOKENS - len(tokens))
    hashes = hashes_of(f"s{system}-", SYSTEM_TOKENS // 16) + hashes_of(f"{system}-{user}-", len(tokens) // 16)
    hashes = hashes[: len(tokens) // 16]
    return SimpleNamespace(
        prompt_token_ids=tokens, prompt_embeds=None, block_hashes=hashes, mm_features=[], cache_salt=None
    )


def _observed_in_scheduler(rounds: int) -> dict[str, list[float]]:
    """Time the call that each request makes: with a place in the queue, without one, and without reports."""
    end = threading.Event()

    def load() -> ChatRenderer:
        end.wait()
        raise NoUserTurnError("the benchmark is over")

    observer = PromptObserver(GROUPS, lambda adapter: None, load)
    attachment = Attachment(Outbox(), 0, pb.Welcome(report_requests=True))
    requests = [_long_request(1000, 10_000 * number) for number in range(NUM_LONG)]
    samples: dict[str, list[float]] = {"queued": [], "skipped": [], "no reports": []}
    for _ in range(rounds):
        observer.attach(attachment)
        for label in samples:
            if label == "skipped":
                for _ in range(2):  # more tokens than the queue takes
                    _time_observed(observer, requests)
            elif label == "no reports":
                observer.attach(None)
            samples[label].append(_time_observed(observer, requests))
    observer.close()
    end.set()
    return samples


def _time_observed(observer: PromptObserver, requests: list[Any]) -> float:
    began_s = time.thread_time()
    for request in requests:
        observer.observe(request, None)
    return (time.thread_time() - began_s) / len(requests)


def _observed_in_thread(rounds: int) -> dict[str, list[float]]:
    """Time the reading of requests: of a system prompt seen before, of one that changes, and without any turn."""
    template = TemplateKnowledge(OPENING, 0, str)
    samples: dict[str, list[float]] = {"seen before": [], "changing": [], "no turn": []}
    readers = {label: RequestReader(ChunkShape.of(GROUPS), lambda adapter: None, template) for label in samples}
    for number in range(rounds + 1):
        changed = _long_request(1000, 10_000)
        changed.prompt_token_ids[2000] = 10_000_000 + number
        changed.block_hashes[125:] = hashes_of(f"changed{number}-", len(changed.block_hashes) - 125)
        of_round = {
            "seen before": _long_request(1000, 7 * number),
            "changing": changed,
            "no turn": _long_request(1000, 7 * number, has_turn=False),
        }
        for label, request in of_round.items():
            observed = _queued(request)
            began_s = time.thread_time()
            assert readers[label].read(observed) is not None
            if number:  # the first of each is not known
                samples[label].append(time.thread_time() - began_s)
    return samples


def _queued(request: Any) -> ObservedRequest:
    queue = RequestQueue()
    queue.put(request, None)
    taken = queue.take()
    assert taken is not None
    return taken


def _print(title: str, samples: dict[str, list[float]]) -> None:
    parts = []
    for label, values in samples.items():
        low, high = statistics.quantiles(values, n=10)[0], statistics.quantiles(values, n=10)[-1]
        parts.append(f"{label} {statistics.median(values) * 1e6:7.1f} us (p10..p90 {low * 1e6:.1f}..{high * 1e6:.1f})")
    if {"vLLM", "kvtier"} == set(samples):
        difference = statistics.median(samples["kvtier"]) - statistics.median(samples["vLLM"])
        parts.append(f"difference {difference * 1e6:+.1f} us")
    print(f"{title:46} " + "  ".join(parts))


if __name__ == "__main__":
    main()
