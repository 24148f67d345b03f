"""The whole engine side: vLLM's requests go into the manager, a fake daemon receives what they begin with."""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier._pb import engine_pb2 as pb
from kvtier.client.engine_session import Attachment
from kvtier.client.outbox import MAX_UNSENT_BATCHES, Outbox
from kvtier.client.warm_requests import new_request_id
from kvtier.core.arena_format import ArenaGeometry
from kvtier_connector.discovery import PromptObserver
from kvtier_connector.discovery.chat_rendering import ChatRenderer, NoUserTurnError
from kvtier_connector.discovery.observed_requests import MAX_QUEUED_REQUESTS
from kvtier_connector.discovery.prompt_observer import _anchor, _Session
from kvtier_connector.discovery.seen_prefixes import prefix_digest
from kvtier_connector.discovery.user_turn import UserTurn
from kvtier_connector.engine.lora.adapter_digests import AdapterDigests
from kvtier_connector.scheduler.manager import EngineParts, KVTierOffloadingManager
from kvtier_connector.session.daemon_events import BackgroundThread, DaemonEvents
from kvtier_connector.session.device_blocks import DeviceBlocks
from kvtier_connector.session.pin_binder import PinBinder
from tests.fakes.fake_daemon import FakeDaemon
from tests.fakes.waiting import wait_for
from tests.unit.connector.discovery import families
from tests.unit.connector.discovery.test_user_turn import messages_of, renderer_of
from tests.unit.connector.discovery.vllm_requests import CHUNK_TOKENS, GROUPS, SHAPE, observed, request_of

SHOP = "You are the assistant of a shop. " * 12


class ReportingDaemon(FakeDaemon):
    """A fake daemon that asks for reports, or does not."""

    report_requests = True

    def _welcome(self, session: str) -> pb.Welcome:
        welcome = super()._welcome(session)
        welcome.report_requests = self.report_requests
        return welcome

    def received(self, kind: str) -> list[Any]:
        """Return the messages of a kind in all sessions."""
        messages = [message for session in self.sessions for message in session.received]
        return [getattr(message, kind) for message in messages if message.WhichOneof("kind") == kind]

    def seen(self) -> list[pb.SeenRequest]:
        """Return all requests that were reported."""
        return [request for report in self.received("requests_seen") for request in report.requests]


class Engine:
    """The scheduler half with a real session.

    Attributes:
        chat: With which its requests are rendered.
    """

    def __init__(self, daemon: ReportingDaemon, load: Callable[[], ChatRenderer], chat: ChatRenderer) -> None:
        self.daemon, self.chat = daemon, chat
        background = BackgroundThread("kvtier-test")
        self.digests = AdapterDigests(background.submit)
        self.observer = PromptObserver(GROUPS, self.digests.digest, load)
        binder = PinBinder(GROUPS, lambda: lambda request: [], self.digests, 1000)
        events = DaemonEvents(
            daemon.socket, lambda turn: pb.Hello(store_credits=2), binder, background, DeviceBlocks(None)
        )
        self.manager = KVTierOffloadingManager()
        parts = EngineParts(
            events=events,
            digests=self.digests,
            groups=GROUPS,
            useful_bytes=(64,),
            num_credits=2,
            lookup_timeout_s=0.25,
            observer=self.observer,
        )
        self.manager.start(parts)
        events.start()
        self._num_requests = 0

    def attach(self) -> None:
        """Wait until the scheduler has a session."""
        wait_for(lambda: self.step() and self.manager._session.attachment is not None)

    def step(self) -> bool:
        """A step of vLLM's scheduler, which is not empty."""
        self.manager.step_scheduled(1)
        return True

    def ask(self, system: str | None, *texts: str, **fields: Any) -> list[int]:
        """Have a user's request arrive; return its tokens."""
        return self.put(self.chat.render(messages_of(system, *texts)), **fields)

    def put(self, tokens: list[int], **fields: Any) -> list[int]:
        """Have a request with these tokens arrive."""
        self._num_requests += 1
        self.manager.register(request_of(tokens, **({"req_id": f"r{self._num_requests}"} | fields)))
        return tokens

    def counted(self, metric: str) -> int:
        """Return a counter of the connector, as vLLM takes it after a step."""
        stats: Any = self.manager.get_stats()
        self._counts = getattr(self, "_counts", 0) + _value(stats, metric)
        return self._counts


def _value(stats: Any, metric: str) -> int:
    return sum(int(each) for name, each in _flat(stats.data if stats is not None else {}) if metric in name)


def _flat(data: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _flat(value, f"{name} {key}")
    elif isinstance(data, int | float):
        yield name, data


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ReportingDaemon]:
    geometry = ArenaGeometry(arena_id=b"A" * 16, num_slots=16, row_bytes=4096, num_ranks=1, rank_bytes=4096)
    fake = ReportingDaemon(tmp_path, geometry)
    fake.start()
    yield fake
    fake.stop()


@contextmanager
def engine_of(daemon: ReportingDaemon) -> Iterator[Engine]:
    """Make an engine, which attaches by itself, and end it."""
    chat = renderer_of(families.QWEN)
    made = Engine(daemon, lambda: chat, chat)
    try:
        yield made
    finally:
        made.manager.shutdown()


@pytest.fixture
def engine(daemon: ReportingDaemon) -> Iterator[Engine]:
    with engine_of(daemon) as made:
        yield made


def test_requests_are_reported_by_their_system_prompt(daemon: ReportingDaemon, engine: Engine) -> None:
    engine.attach()
    for question in ("Where is it?", "What does it cost?", "When?"):
        tokens = engine.ask(SHOP, question)
    wait_for(lambda: len(daemon.seen()) == 3)
    seen = daemon.seen()
    assert len({request.prompt_digest for request in seen}) == 3
    assert seen[-1].num_tokens == len(tokens)
    (digest,) = {request.prefixes[0].digest for request in seen}
    prefix = seen[0].prefixes[0]
    assert prefix.is_system_prompt
    assert prefix.num_tokens % CHUNK_TOKENS == 0
    opening = engine.chat.decode(tokens).index("<|im_start|>user")
    covered = engine.chat.decode(tokens[: prefix.num_tokens])
    assert opening - len(engine.chat.decode(tokens[:CHUNK_TOKENS])) < len(covered) <= opening
    assert len(digest) == 16


def test_tokens_are_sent_for_the_next_request_that_begins_with_what_is_wanted(
    daemon: ReportingDaemon, engine: Engine
) -> None:
    engine.attach()
    tokens = engine.ask(SHOP, "Where?")
    wait_for(lambda: bool(daemon.seen()))
    prefix = daemon.seen()[0].prefixes[0]
    wanted = pb.DaemonMessage(prefixes_wanted=pb.PrefixesWanted(digests=[prefix.digest, b"x" * 16]))
    daemon.session().send(wanted)
    wait_for(lambda: engine.step() and bool(engine.observer._session and engine.observer._session.wanted))
    assert daemon.received("prefix_tokens") == [], "nothing keeps the tokens of a request"
    for question in ("When?", "Why?", "Who?"):
        engine.ask(SHOP, question)
    wait_for(lambda: len(daemon.seen()) == 4)
    (sent,) = daemon.received("prefix_tokens")
    assert list(sent.tokens) == tokens[: prefix.num_tokens]
    assert (sent.digest, sent.lora_name, sent.cache_salt) == (prefix.digest, "", "")
    daemon.session().send(wanted)
    wait_for(lambda: engine.step() and len(getattr(engine.observer._session, "wanted", ())) == 2)
    engine.ask(SHOP, "How?")
    wait_for(lambda: len(daemon.received("prefix_tokens")) == 2)


def test_a_name_in_the_system_prompt_is_reported_with_what_stands_there(
    daemon: ReportingDaemon, engine: Engine
) -> None:
    engine.attach()
    names = ["Ada", "Bob", "Cem", "Dan", "Eva", "Fay", "Gus", "Hal", "Ida"]
    for name in names:
        engine.ask(f"{SHOP}The customer is {name}. {'Answer in two sentences. ' * 8}", "Where?")
    wait_for(lambda: bool(daemon.received("changing_middle")) and len(daemon.seen()) == len(names))
    (changing,) = daemon.received("changing_middle")
    assert changing.num_prompts == 8
    assert changing.before.endswith("The customer is")
    assert [example.split()[0] for example in changing.examples] == ["Fay.", "Gus.", "Hal."]
    last = daemon.seen()[-1]
    assert changing.digest in [prefix.digest for prefix in last.prefixes]
    assert changing.num_stable_tokens < changing.num_tokens < last.num_tokens


def test_what_is_not_a_users_prompt_is_not_reported(daemon: ReportingDaemon, engine: Engine) -> None:
    engine.attach()
    engine.ask(SHOP, "warm", req_id=new_request_id())
    engine.put([1] * (CHUNK_TOKENS - 1))
    embeds: Any = request_of([1] * 100)
    embeds.prompt_embeds = object()
    engine.manager.register(embeds)
    nothing: Any = request_of([1] * 100)
    nothing.prompt_token_ids = None
    engine.manager.register(nothing)
    strange: Any = request_of([1] * 100)
    strange.mm_features = [object()]
    engine.manager.register(strange)
    # Its tokens became an automatic pin, which the daemon writes down, and its text an example in `kvtier advise`.
    private = request_of([1] * 100)
    private.kv_transfer_params = {"kvtier": {"no_store": True}}
    engine.manager.register(private)
    engine.put([1] * 100, salt="a\0b")  # the daemon would end the session when it gets the tokens
    engine.put([1] * CHUNK_TOKENS)
    wait_for(lambda: bool(daemon.seen()))
    assert [request.num_tokens for request in daemon.seen()] == [CHUNK_TOKENS]
    assert sum(report.num_skipped for report in daemon.received("requests_seen")) == 2, "vLLM's requests go on"


def test_a_daemon_that_wants_no_reports_gets_none(daemon: ReportingDaemon) -> None:
    daemon.report_requests = False
    with engine_of(daemon) as engine:
        engine.attach()
        engine.ask(SHOP, "Where?")
        assert engine.observer._session is None
        daemon.report_requests = True
        daemon.stop()
        daemon.start()
        wait_for(lambda: engine.step() and engine.observer._session is not None)
        engine.ask(SHOP, "Where?")
        wait_for(lambda: len(daemon.seen()) == 1)


def test_reports_go_on_in_the_next_session(daemon: ReportingDaemon, engine: Engine) -> None:
    engine.attach()
    engine.ask(SHOP, "Where?")
    wait_for(lambda: len(daemon.seen()) == 1)
    thread = engine.observer._thread
    daemon.stop()
    wait_for(lambda: engine.step() and engine.observer._session is None)
    engine.ask(SHOP, "No one listens")
    daemon.start()
    wait_for(lambda: engine.step() and engine.observer._session is not None)
    engine.ask(SHOP, "When?")
    wait_for(lambda: len(daemon.seen()) == 2)
    assert engine.observer._thread is thread, "the template is learnt once"


def test_more_requests_than_are_looked_at_are_counted(daemon: ReportingDaemon) -> None:
    """They come while the template is being learnt: nothing waits, nothing grows."""
    chat = renderer_of(families.QWEN)
    gate: list[ChatRenderer] = []

    def load() -> ChatRenderer:
        wait_for(lambda: bool(gate), timeout_s=60)
        return gate[0]

    engine = Engine(daemon, load, chat)
    engine.attach()
    for number in range(MAX_QUEUED_REQUESTS + 50):
        engine.put([number] * CHUNK_TOKENS)
    gate.append(chat)
    wait_for(lambda: len(daemon.seen()) == MAX_QUEUED_REQUESTS, timeout_s=30)
    reports = daemon.received("requests_seen")
    assert sum(report.num_skipped for report in reports) == 50
    assert all(len(report.requests) <= 1024 for report in reports)
    wait_for(lambda: engine.counted("skipped_requests") == 50)
    engine.manager.shutdown()
    thread = engine.observer._thread
    assert thread is not None
    wait_for(lambda: not thread.is_alive())


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NoUserTurnError("the model has no chat template"), "the model has no chat template"),
        (OSError("no tokenizer.json"), r"fails \(OSError: no tokenizer.json\)"),
        (RecursionError("deep"), r"fails \(RecursionError: deep\)"),
        (TimeoutError(), "is not rendered within"),
    ],
)
def test_a_template_that_cannot_be_learnt_is_one_line_and_fixed_lengths(
    daemon: ReportingDaemon, caplog: pytest.LogCaptureFixture, error: Exception, reason: str
) -> None:
    def load() -> ChatRenderer:
        raise error

    engine = Engine(daemon, load, renderer_of(families.QWEN))
    with caplog.at_level(logging.INFO, "kvtier_connector"):
        engine.attach()
        engine.put(list(range(1200)))
        wait_for(lambda: len(daemon.seen()) == 1)
    assert [(each.num_tokens, each.is_system_prompt) for each in daemon.seen()[0].prefixes] == [(1024, False)]
    (line,) = [each.getMessage() for each in caplog.records if "discovery" in each.name]
    assert line.startswith("kvtier: prompts are found by fixed lengths only: ")
    assert re.search(reason, line)
    engine.manager.shutdown()


def test_what_was_learnt_is_logged(daemon: ReportingDaemon, caplog: pytest.LogCaptureFixture) -> None:
    chat = renderer_of(families.LLAMA_3)
    dated = Engine(daemon, lambda: chat, chat)
    with caplog.at_level(logging.INFO, "kvtier_connector"):
        dated.attach()
        dated.ask(SHOP, "Where?")
        wait_for(lambda: len(daemon.seen()) == 1)
    lines = [each.getMessage() for each in caplog.records if "prompt_observer" in each.name]
    assert "user<|end_header_id|>" in lines[0]
    assert "writes today's date into every prompt" in lines[1]
    assert "shop" not in " ".join(lines), "nothing of a prompt"
    dated.manager.shutdown()


def test_a_request_that_cannot_be_read_is_one_line_and_others_are_reported(
    daemon: ReportingDaemon, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.attach()
    broken: Any = request_of([1] * 100)
    for number in range(3):
        broken.block_hashes = [None] * 6
        engine.manager.register(broken)
        engine.ask(SHOP, f"Where is {number}?")
    wait_for(lambda: len(daemon.seen()) == 3)
    wait_for(lambda: sum(report.num_skipped for report in daemon.received("requests_seen")) == 3)
    assert len([each for each in caplog.records if "could not be looked at" in each.getMessage()]) == 1


def test_without_a_thread_no_prompt_is_found_until_the_next_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a container's limit of processes a daemon that came ended vLLM's engine."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    attachment = Attachment(Outbox(), 0, pb.Welcome(report_requests=True))
    observer = PromptObserver(GROUPS, lambda adapter: None, lambda: renderer_of(families.QWEN))
    request = request_of([1] * 100)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        observer.attach(attachment)
    observer.observe(request, None)
    assert observer.shared_tokens(request) == 100, "a request that asks for a pin does not wait for the template"
    observer.attach(attachment)
    observer.observe(request, None)
    wait_for(lambda: (counts := observer.take_counts()) is not None and counts == (1, 0, True))
    observer.close()


def test_a_daemon_that_does_not_read_is_sent_no_more() -> None:
    outbox = Outbox()
    attachment = Attachment(outbox, 0, pb.Welcome(report_requests=True))
    observer = PromptObserver(GROUPS, lambda adapter: None, lambda: renderer_of(families.QWEN))
    for _ in range(MAX_UNSENT_BATCHES + 1):
        outbox.put(pb.EngineMessage(touch=pb.Touch()))
    assert attachment.is_behind
    observer.attach(attachment)
    request = request_of([1] * 100)
    observer.observe(request, None)
    wait_for(lambda: (counts := observer.take_counts()) is not None and counts.num_skipped == 1)
    kinds = []
    while batch := outbox.take(0):
        kinds += [message.WhichOneof("kind") for message in batch]
    assert set(kinds) == {"touch"}
    assert not attachment.is_behind
    observer.observe(request, None)
    wait_for(lambda: (counts := observer.take_counts()) is not None and counts == (1, 0, True))
    (report,) = outbox.take() or []
    assert report.requests_seen.num_skipped == 1, "said when the daemon reads again"
    observer.close()


@pytest.mark.parametrize(("special", "anchor"), [({7}, 2), ({6, 7}, 1), ({5, 7}, 0), (set(), 0), ({9}, 0)])
def test_openings_are_searched_by_a_token_that_no_text_has(special: set[int], anchor: int) -> None:
    chat: Any = SimpleNamespace(special_tokens=special)
    assert _anchor(chat, UserTurn((5, 6, 7))) == anchor


def test_what_is_read_as_the_daemon_falls_behind_is_counted_as_skipped_once() -> None:
    outbox = Outbox()
    session = _Session(Attachment(outbox, 0, pb.Welcome(report_requests=True)))
    observer = PromptObserver(GROUPS, lambda adapter: None, lambda: renderer_of(families.QWEN))

    def send(num_requests: int) -> tuple[int, int]:
        observer._send(session, pb.RequestsSeen(requests=[pb.SeenRequest()] * num_requests))
        counts = observer.take_counts()
        return (0, 0) if counts is None else (counts.num_observed, counts.num_skipped)

    for _ in range(MAX_UNSENT_BATCHES + 1):
        outbox.put(pb.EngineMessage(touch=pb.Touch()))
    session.queue.num_skipped = 4
    assert [send(3), send(2), send(0)] == [(0, 7), (0, 2), (0, 0)]
    while outbox.take(0):
        pass
    assert [send(5), send(0), send(1)] == [(5, 0), (0, 0), (1, 0)]
    session.queue.num_skipped += 1
    assert send(0) == (0, 1)
    sent = []
    while batch := outbox.take(0):
        sent += [(len(each.requests_seen.requests), each.requests_seen.num_skipped) for each in batch]
    assert sent == [(5, 9), (1, 0), (0, 1)]


def test_digests_agree_with_those_of_the_request(daemon: ReportingDaemon, engine: Engine) -> None:
    engine.attach()
    tokens = engine.ask(SHOP, "Where?", salt="tenant")
    wait_for(lambda: len(daemon.seen()) == 1)
    prefix = daemon.seen()[0].prefixes[0]
    assert prefix.digest == prefix_digest(SHAPE, observed(tokens, salt="tenant"), prefix.num_tokens, None)


def test_what_others_may_share_is_the_system_prompt(daemon: ReportingDaemon, engine: Engine) -> None:
    def shared(tokens: list[int], **fields: Any) -> int | None:
        return engine.observer.shared_tokens(request_of(tokens, **fields))

    assert shared([1, 2, 3]) is None, "the template is not learnt yet"
    engine.attach()
    wait_for(lambda: shared([1, 2, 3]) is not None)
    asked = engine.ask(SHOP, "Where?")
    end = shared(asked)
    assert end is not None
    assert 0 < end < len(asked)
    assert shared(engine.ask(SHOP, "And when?")) == end
    assert shared(list(range(100))) == 100, "no chat: all of it"
    embeds: Any = request_of(asked)
    embeds.prompt_embeds = object()
    assert engine.observer.shared_tokens(embeds) == len(asked), "its tokens say nothing"
    embeds.prompt_token_ids = embeds.prompt_embeds = None
    assert engine.observer.shared_tokens(embeds) == len(asked)


def test_without_a_template_all_of_a_prompt_may_be_shared(daemon: ReportingDaemon) -> None:
    chat = renderer_of(families.QWEN)

    def fails() -> ChatRenderer:
        raise ValueError("no template")

    made = Engine(daemon, fails, chat)
    made.attach()
    wait_for(lambda: made.observer.shared_tokens(request_of([1, 2, 3])) == 3)
    made.manager.shutdown()
