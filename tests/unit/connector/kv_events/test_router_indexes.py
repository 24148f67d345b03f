"""What routers whose sources we have read know of an engine with kvtier, from its messages alone."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher

from benchmarks.routing.simulated_host import BLOCK_TOKENS, MessageMaker, SimulatedHost
from kvtier_connector.kv_events.host_events import REPEAT_S
from tests.subscribers.aibrix_gateway import AibrixGateway, ProposedAibrixGateway
from tests.subscribers.llmd_router import MEDIUM_WEIGHTS, AdapterNames, LlmdRouter
from tests.subscribers.typed_subscriber import replayed, typed_events
from tests.subscribers.wire import AskedPrompt, Message, RefusedBatchError, RouterIndex

NUM_BLOCKS = 6
POD = "engine"
POOL_BLOCKS = 40
PROMPT = AskedPrompt(tokens=range(100, 100 + NUM_BLOCKS * BLOCK_TOKENS))
SALTED = AskedPrompt(tokens=PROMPT.tokens, cache_salt="tenant")
OF_ADAPTER = AskedPrompt(tokens=PROMPT.tokens, adapter="adapter")
DEADLINE_S = 30.0

IndexType = Callable[[int], RouterIndex]
EVERY_INDEX = [LlmdRouter, ProposedAibrixGateway]


def engine() -> SimulatedHost:
    return SimulatedHost(POD, POOL_BLOCKS, announces=True)


def publish(host: SimulatedHost, index: RouterIndex, passed_s: float = 0.0) -> int:
    """Have a router receive what an engine publishes; return the number of its messages."""
    messages = host.take_messages(passed_s)
    for message in messages:
        index.receive(POD, message)
    return len(messages)


@pytest.mark.parametrize("make_index", EVERY_INDEX)
def test_a_pinned_prompt_is_known_before_any_request_and_again_after_a_restart(make_index: IndexType) -> None:
    host, index = engine(), make_index(BLOCK_TOKENS)
    host.pin("p", PROMPT)
    assert not index.num_blocks(PROMPT)
    publish(host, index)
    assert index.num_blocks(PROMPT) == {POD: NUM_BLOCKS}
    host.restart()
    index.forget(POD)
    assert not index.num_blocks(PROMPT)
    publish(host, index)
    assert index.num_blocks(PROMPT) == {POD: NUM_BLOCKS}


@pytest.mark.parametrize("make_index", EVERY_INDEX)
def test_of_a_prompt_that_leaves_host_memory_only_what_is_left_is_known(make_index: IndexType) -> None:
    host, index = engine(), make_index(BLOCK_TOKENS)
    host.pin("p", PROMPT)
    publish(host, index)
    for num_left in (2, 0):
        host.evict("p", num_left)
        publish(host, index)
        assert index.num_blocks(PROMPT) == ({POD: num_left} if num_left else {})


@pytest.mark.parametrize("make_index", EVERY_INDEX)
def test_it_is_known_while_either_memory_has_it(make_index: IndexType) -> None:
    """A request loads it: the engine's GPU memory has it too, and routers rate that higher. Then vLLM forgets it."""
    host, index = engine(), make_index(BLOCK_TOKENS)
    host.pin("p", PROMPT)
    publish(host, index)
    in_host_memory = index.scores(PROMPT)[POD]
    host.serve(PROMPT)
    publish(host, index)
    assert index.scores(PROMPT)[POD] > in_host_memory
    host.evict("p")
    publish(host, index)
    assert index.num_blocks(PROMPT) == {POD: NUM_BLOCKS}, "in GPU memory"
    host.reset_cache()
    publish(host, index)
    assert not index.num_blocks(PROMPT)


@pytest.mark.parametrize("make_index", EVERY_INDEX)
def test_after_a_reset_and_after_many_repetitions_it_is_known_until_it_leaves(make_index: IndexType) -> None:
    """llm-d counts repeated stores: a repetition that were stored only would keep the prompt for ever."""
    host, index = engine(), make_index(BLOCK_TOKENS)
    host.pin("p", PROMPT)
    publish(host, index)
    host.reset_cache()
    assert publish(host, index)
    assert index.num_blocks(PROMPT) == {POD: NUM_BLOCKS}
    for number in range(5):
        assert publish(host, index, passed_s=2 ** (number + 2) * REPEAT_S)
        assert index.num_blocks(PROMPT) == {POD: NUM_BLOCKS}
    host.evict("p")
    publish(host, index)
    assert not index.num_blocks(PROMPT)


@pytest.mark.parametrize("make_index", EVERY_INDEX)
def test_a_router_that_was_started_later_knows_it_after_a_repetition(make_index: IndexType) -> None:
    host = engine()
    host.pin("p", PROMPT)
    publish(host, make_index(BLOCK_TOKENS))
    late = make_index(BLOCK_TOKENS)
    publish(host, late, passed_s=2 * REPEAT_S)
    assert late.num_blocks(PROMPT) == {POD: NUM_BLOCKS}


def test_llmd_knows_the_kind_of_the_group_before_the_engine_has_named_it() -> None:
    """It drops stored blocks of a group of which it knows no kind: kvtier's events are the first that it receives."""
    host, index = engine(), LlmdRouter(BLOCK_TOKENS)
    host.pin("p", PROMPT)
    (message,) = host.take_messages()
    (event,) = typed_events(message)
    assert getattr(event, "kv_cache_spec_kind", None) == "full_attention"
    index.receive(POD, message)
    assert index.scores(PROMPT) == {POD: pytest.approx(NUM_BLOCKS * MEDIUM_WEIGHTS["cpu"])}


def test_llmd_finds_a_salted_prompt_by_its_salt_alone() -> None:
    host, index = engine(), LlmdRouter(BLOCK_TOKENS)
    host.pin("p", SALTED)
    publish(host, index)
    assert index.num_blocks(SALTED) == {POD: NUM_BLOCKS}
    assert not index.num_blocks(PROMPT)


def test_llmd_finds_a_prompt_of_an_adapter_since_it_skips_the_adapters_name() -> None:
    for adapter_names, found in ((AdapterNames.SKIPPED, {POD: NUM_BLOCKS}), (AdapterNames.HASHED, {})):
        host, index = engine(), LlmdRouter(BLOCK_TOKENS, adapter_names)
        host.pin("p", OF_ADAPTER)
        publish(host, index)
        assert index.num_blocks(OF_ADAPTER) == found
        assert not index.num_blocks(PROMPT)


def test_the_released_gateway_of_aibrix_refuses_all_events_of_vllm() -> None:
    """Those of vLLM's own as well: they are maps since its #42892, and it takes arrays."""
    host, index = engine(), AibrixGateway(BLOCK_TOKENS)
    host.serve(PROMPT)
    (own,) = host.take_messages()
    host.pin("p", PROMPT)
    (announced,) = host.take_messages()
    for message in (own, announced):
        with pytest.raises(RefusedBatchError, match="expected msgpack array"):
            index.receive(POD, message)
    assert not index.num_blocks(PROMPT)


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[tuple[ZmqEventPublisher, str, str]]:
    """vLLM's publisher of events, and where it publishes and replays."""
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    made = ZmqEventPublisher(0, endpoint=endpoint, replay_endpoint=replay, topic="kv@engine@model")
    yield made, endpoint, replay
    made.shutdown()


def received(endpoint: str, started: threading.Event, messages: "queue.Queue[Message]") -> None:
    """Put the first message that comes."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        started.set()
        if socket.poll(int(DEADLINE_S * 1000)):
            messages.put(Message(*socket.recv_multipart()))


def test_messages_are_as_vllm_publishes_them(publisher: tuple[ZmqEventPublisher, str, str]) -> None:
    """The topic, the number's bytes and the payload, of both kinds of events."""
    published, endpoint, replay = publisher
    host = engine()
    host.pin("p", PROMPT)
    events: list[Any] = [*host.announcements()]
    host.evict("p")
    events += host.announcements()
    assert [type(each) for each in events] == [BlockStored, BlockRemoved]

    started, messages = threading.Event(), queue.Queue[Message]()
    thread = threading.Thread(target=received, args=(endpoint, started, messages))
    thread.start()
    assert started.wait(DEADLINE_S)
    deadline_s = time.monotonic() + DEADLINE_S
    while messages.empty() and time.monotonic() < deadline_s:  # until the subscription has reached the publisher
        published.publish(KVEventBatch(ts=5.0, events=events))
        time.sleep(0.05)
    thread.join()
    message = messages.get_nowait()
    own = MessageMaker("kv@engine@model").message(events, 5.0)
    assert (message.topic, message.payload) == (own.topic, own.payload)
    assert typed_events(message) == typed_events(own)
    first = next(iter(replayed(replay, 0, DEADLINE_S)))
    assert (first.number, first.payload) == (own.number, own.payload)
