"""Prompts that vLLM renders and computes by itself: sources without tokens, other templates, other namespaces."""

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier._pb.cache_pb2 import PinRequest, PromptBinding, PromptStatus
from kvtier.client.admin import AdminClient
from kvtier.errors import DaemonUnreachableError
from kvtier.library.rendering.recipe import Recipe, SourceKind
from kvtier_connector.own_api import refresh, warm_start
from tests.fakes import fake_cache_service
from tests.fakes.fake_cache_service import FakeCacheService
from tests.fakes.waiting import wait_for
from tests.unit.cli import fake_vllm
from tests.unit.cli.fake_vllm import FakeVllm
from tests.unit.connector.own_api.test_warm_start import NAMESPACE, Rig

State = PromptStatus
SYSTEM = "You are a parrot. " * 20


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    for name in ("POLL_S", "SLOW_POLL_S"):
        monkeypatch.setattr(warm_start, name, 0.005)
    monkeypatch.setattr(refresh, "PERIOD_S", 0.01)
    with (
        fake_vllm.serving(FakeVllm()) as vllm,
        fake_cache_service.serving(FakeCacheService(), tmp_path / "s") as daemon,
    ):
        made = Rig(daemon, vllm, tmp_path / "s")
        daemon.num_engines = 1
        yield made
        for started in made.started:
            started.close()


@pytest.fixture
def pin(rig: Rig) -> Iterator[Callable[..., PromptStatus]]:
    """Pin a source, without tokens."""
    with AdminClient(rig.socket) as client:

        def pin_source(name: str, text: str = SYSTEM, **fields: Any) -> PromptStatus:
            recipe = Recipe(kind=SourceKind.SYSTEM, content=text)
            return client.pin(PinRequest(name=name, recipe_json=recipe.to_json(), **fields))

        yield pin_source


Pin = Callable[..., PromptStatus]


def state(rig: Rig, name: str) -> int:
    return int(rig.daemon.prompts[name].state)


def test_a_source_is_rendered_and_computed_when_a_vllm_comes(rig: Rig, pin: Pin) -> None:
    rig.vllm.on_completion = lambda body: rig.daemon.capture()
    pin("late", priority=1)
    pin("later", text=SYSTEM + "Sing.", cache_salt="pepper", model="toy")
    pin("elsewhere", model="other")
    rig.start()
    wait_for(lambda: state(rig, "late") == state(rig, "later") == State.DURABLE)
    assert state(rig, "elsewhere") == State.UNRENDERED
    assert rig.daemon.prompts["late"].num_tokens > 300
    assert rig.daemon.prompts["late"].priority == 1
    assert rig.daemon.prompts["later"].cache_salt == "pepper"
    assert {body.get("cache_salt") for body in rig.completions()} <= {None, "pepper"}


def test_an_error_that_no_one_foresaw_ends_nothing_but_the_attempt(
    rig: Rig, pin: Pin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread ended by it, until vLLM was started again: no pin that came later was rendered or computed."""
    attempts = itertools.count()

    def connect(*args: Any, **options: Any) -> AdminClient:
        if next(attempts) < 3:
            raise RuntimeError("can't start new thread")
        return AdminClient(*args, **options)

    monkeypatch.setattr(warm_start, "AdminClient", connect)
    monkeypatch.setattr(warm_start, "RETRY_S", 0.01)
    rig.vllm.on_completion = lambda body: rig.daemon.capture()
    pin("late")
    rig.start()
    wait_for(lambda: state(rig, "late") == State.DURABLE)
    assert caplog.text.count("RuntimeError: can't start new thread") == 3


def test_one_that_comes_while_vllm_runs_is_rendered_too(rig: Rig, pin: Pin) -> None:
    rig.start()
    wait_for(lambda: bool([path for path, _ in rig.vllm.requests if path == "/health"]))
    pin("new")
    wait_for(lambda: state(rig, "new") == State.CAPTURING)


def test_users_go_first(rig: Rig, pin: Pin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "SLOW_POLL_S", 0.002)
    rig.serves_users = True
    pin("p")
    rig.start()
    wait_for(lambda: rig.started[0]._refresher is not None and not rig.started[0]._refresher.is_due())
    assert state(rig, "p") == State.UNRENDERED
    rig.serves_users = False
    wait_for(lambda: state(rig, "p") == State.CAPTURING)


def test_what_another_namespace_holds_is_computed_here_by_priority(rig: Rig) -> None:
    """As after other weights: this engine's binding has no chunk on disk."""

    def own(num_durable: int) -> list[PromptBinding]:
        return [
            PromptBinding(namespace_id="old" * 10, num_chunks=6, num_durable_chunks=6, covered_tokens=96),
            PromptBinding(namespace_id=NAMESPACE, num_chunks=6, num_durable_chunks=num_durable, covered_tokens=96),
        ]

    stale: dict[str, Any] = {"bindings": own(0), "origin": "named", "state": State.STALE}
    rig.pin("low", **stale)
    rig.pin("high", priority=5, **stale)
    rig.pin("whole", **stale | {"bindings": own(6), "state": State.DURABLE})
    rig.pin("automatic", **stale | {"origin": "auto"})
    rig.pin("ended", **stale | {"pinned": False})
    rig.pin("refused", **stale | {"error": "too long"})
    rig.start()
    wait_for(lambda: {0, 1} <= set(rig.warmed()))
    computed = [number for number in rig.warmed() if number != 2]  # "whole" is warmed: it is held
    assert computed[:2] == [1, 0]
    assert set(computed) == {0, 1}


def test_what_does_not_become_durable_is_tried_again_later_and_later(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    binding = PromptBinding(namespace_id=NAMESPACE, num_chunks=6, num_durable_chunks=5)
    rig.pin("p", bindings=[binding], origin="named", state=State.CAPTURING)
    facts = rig.start()._facts
    computed: list[str] = []

    def compute(daemon: AdminClient, status: PromptStatus) -> str:
        computed.append(status.name)
        return ""

    refresher = refresh.Refresher(facts, rig.vllm.url, lambda: True, compute)
    with AdminClient(rig.socket) as daemon:
        for _ in range(100):
            refresher.look(daemon, NAMESPACE)
            now_s[0] += 1.0
        assert len(computed) == 4, "after 0, 10, 30 and 70 s"
        after = PromptBinding(namespace_id="that after a change of weights", num_chunks=6, ephemeral=True)
        rig.daemon.prompts["p"].bindings.append(after)
        refresher.look(daemon, after.namespace_id)
        assert len(computed) == 5


def test_where_nothing_reaches_the_disk_host_memory_counts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights changed in place. What is lost again soon is computed again, but not every few seconds."""
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    binding = PromptBinding(namespace_id=NAMESPACE, num_chunks=6, ephemeral=True)
    rig.pin("p", bindings=[binding], origin="named", state=State.CAPTURING)
    computed: list[float] = []

    def set_held(num_chunks: int, state: "PromptStatus.State") -> None:
        pinned = rig.daemon.prompts["p"]
        pinned.bindings[0].num_host_chunks, pinned.state = num_chunks, state

    def compute(daemon: AdminClient, status: PromptStatus) -> str:
        computed.append(now_s[0] - 1000.0)
        set_held(6, State.DURABLE)
        return ""

    refresher = refresh.Refresher(rig.start()._facts, rig.vllm.url, lambda: True, compute)
    with AdminClient(rig.socket) as daemon:
        for second in range(100):
            refresher.look(daemon, NAMESPACE)
            now_s[0] += 1.0
            if second % 2:
                set_held(5, State.CAPTURING)
    assert len(computed) == 4, computed


def durable_before_a_restart(rig: Rig, pin: Pin) -> dict[str, str]:
    """Have four sources of one shape computed, the later the more important, and stop; return what their tokens are."""
    rig.vllm.on_completion = lambda body: rig.daemon.capture()
    for number in range(4):
        pin(f"p{number}", text=f"{number} {SYSTEM}", priority=number)
    first = rig.start()
    wait_for(lambda: all(state(rig, f"p{number}") == State.DURABLE for number in range(4)))
    first.close()
    return {name: status.tokens_digest for name, status in rig.daemon.prompts.items()}


def test_another_template_gives_the_pin_a_version(rig: Rig, pin: Pin) -> None:
    """vLLM was started again with another --chat-template: requests begin with other tokens now."""
    before = durable_before_a_restart(rig, pin)
    rig.vllm.template = lambda messages, tools: "[new]" + fake_vllm.plain_template(messages, tools)
    rig.start()
    wait_for(lambda: all(rig.daemon.prompts[name].tokens_digest != digest for name, digest in before.items()))
    assert {name for name in rig.daemon.prompts if "@" in name} == {f"p{number}@1" for number in range(4)}


def test_the_same_template_renders_a_sample_and_changes_nothing(rig: Rig, pin: Pin) -> None:
    rig.vllm.on_completion = lambda body: rig.daemon.capture()
    for number in range(5):
        pin(f"p{number}", text=f"{number} {SYSTEM}")
    first = rig.start()
    wait_for(lambda: all(state(rig, f"p{number}") == State.DURABLE for number in range(5)))
    first.close()
    num_pins = len(rig.daemon.pins)
    rig.vllm.requests.clear()
    again = rig.start()
    wait_for(lambda: again._refresher is not None and again._refresher.is_checked)
    assert len(rig.daemon.pins) == num_pins
    rendered = {body["messages"][0]["content"][0] for path, body in rig.vllm.requests if path == "/tokenize"}
    assert len(rendered) == 2, "of five sources of one shape"


def test_a_source_that_vllm_refuses_does_not_stop_the_others(
    rig: Rig, pin: Pin, caplog: pytest.LogCaptureFixture
) -> None:
    def picky(messages: list[dict[str, Any]], tools: list[Any]) -> str:
        if messages[0]["content"].startswith("bad"):
            raise fake_vllm.RefusedError("no such thing")
        return fake_vllm.plain_template(messages, tools)

    rig.vllm.template = picky
    pin("bad", text="bad " + SYSTEM, priority=9)
    pin("good")
    rig.start()
    wait_for(lambda: state(rig, "good") == State.CAPTURING)
    assert state(rig, "bad") == State.UNRENDERED
    assert "cannot render name=bad" in caplog.text
    assert "parrot" not in caplog.text


def test_what_the_daemon_did_not_answer_is_looked_at_again(rig: Rig, pin: Pin, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the daemon was away all sources counted as looked at: those pins kept the tokens of the old template."""
    before = durable_before_a_restart(rig, pin)
    rig.vllm.template = lambda messages, tools: "[new]" + fake_vllm.plain_template(messages, tools)
    get, num_lost = AdminClient.get, list[str]()

    def losing(self: AdminClient, *args: Any, **fields: Any) -> PromptStatus:
        if len(num_lost) < 3:
            num_lost.append("")
            raise DaemonUnreachableError("s", "the test says so")
        return get(self, *args, **fields)

    monkeypatch.setattr(AdminClient, "get", losing)
    rig.start()
    wait_for(lambda: all(rig.daemon.prompts[name].tokens_digest != digest for name, digest in before.items()))
    assert len(num_lost) == 3


def test_what_vllm_refuses_says_nothing_of_the_others_of_its_shape(rig: Rig, pin: Pin) -> None:
    """Two that could not be rendered stood for all: their template was taken for the same."""
    before = durable_before_a_restart(rig, pin)

    def picky(messages: list[dict[str, Any]], tools: list[Any]) -> str:
        if messages[0]["content"][0] in "23":
            raise fake_vllm.RefusedError("no such thing")
        return "[new]" + fake_vllm.plain_template(messages, tools)

    rig.vllm.template = picky
    rig.start()
    wait_for(lambda: all(rig.daemon.prompts[name].tokens_digest != before[name] for name in ("p0", "p1")))


def test_it_can_be_switched_off(rig: Rig, pin: Pin, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvtier_connector")
    pin("p")
    rig.settings = {"refresh": False}
    started = rig.start()

    def num_rounds() -> int:
        return [path for path, _ in rig.vllm.requests].count("/health")

    wait_for(lambda: num_rounds() >= 1)
    wait_for(lambda: "warm start" in caplog.text)
    rig.cache = object()
    wait_for(lambda: num_rounds() >= 2)
    assert started._refresher is None
    assert state(rig, "p") == State.UNRENDERED


def test_what_another_host_computes_is_left_out(rig: Rig, pin: Pin) -> None:
    rig.vllm.on_completion = lambda body: rig.daemon.capture()
    for name in ("elsewhere", "here"):
        pin(name, tokens=range(64), model="toy")
        status = rig.daemon.prompts[name]
        status.state, status.computed_elsewhere = State.CAPTURING, name == "elsewhere"
        status.bindings.add(namespace_id=NAMESPACE, num_chunks=3)
    rig.start()
    wait_for(lambda: bool(rig.completions()))
    time.sleep(0.2)
    assert len(rig.completions()) == 1
