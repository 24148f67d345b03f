"""`Client.verify`, readiness, events and quarantine, against fakes."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from kvtier import AsyncClient, Client, ComparisonVerdict, PromptState
from kvtier._pb.cache_pb2 import Event
from kvtier.errors import (
    DaemonUnreachableError,
    InvalidArgumentError,
    NamespaceNotFoundError,
    PromptNotBoundError,
    PromptNotFoundError,
)
from kvtier.verification.comparison import MAX_ATTEMPTS
from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli.fake_vllm import FakeVllm

SECRET = "The secret is parrots. " * 20


def test_a_right_prompt(kvtier: Client) -> None:
    kvtier.pin("bot", text=SECRET)
    result = kvtier.verify("bot")
    assert (result.damaged, result.different, result.conclusive) == (False, False, True)
    assert result.live is not None
    assert (result.live.verdict, result.live.restored_tokens) == (ComparisonVerdict.EQUAL, 576)
    assert (result.model, result.vllm_version, result.daemon_version) == ("toy", "0.32.0", "0.1.0")
    assert result.live_namespace_ids == ("n" * 64,)


def test_a_report_has_versions_and_namespaces_and_nothing_of_the_prompt(kvtier: Client) -> None:
    kvtier.pin("bot", text=SECRET, cache_salt="pepper")
    report = kvtier.verify("bot").to_json()
    values = json.loads(report)
    assert values["oracle"] == "checksums, live vLLM"
    assert values["live"]["verdict"] == "EQUAL"
    assert values["checksums"]["namespaces"][0]["namespace_id"] == "n" * 64
    assert values["verified_unix_s"] > 0
    assert not [word for word in ("secret", "pepper", str(ord("T"))) if f'"{word}' in report]


def test_answers_that_differ(kvtier: Client, vllm: FakeVllm) -> None:
    kvtier.pin("bot", text=SECRET)
    vllm.restored_logprob = -1.5
    result = kvtier.verify("bot")
    assert (result.damaged, result.different, result.conclusive) == (False, True, True)
    assert result.live is not None
    assert result.live.max_difference == 1.5
    asked = [body["cache_salt"] for path, body in vllm.requests if "logprobs" in body]
    assert len({salt for salt in asked if salt.startswith("kvtier-verify-")}) == MAX_ATTEMPTS


def test_bytes_only(kvtier: Client, vllm: FakeVllm, daemon: FakeCacheService) -> None:
    kvtier.pin("bot", text=SECRET)
    num_asked, daemon.damaged_chunks = len(vllm.requests), 1
    result = kvtier.verify("bot", live=False)
    assert (result.damaged, result.live, result.to_dict()["oracle"]) == (True, None, "checksums")
    assert len(vllm.requests) == num_asked


def test_without_a_vllm_the_live_comparison_is_inconclusive(daemon: FakeCacheService, tmp_path: Path) -> None:
    with Client(tmp_path / "s", url="http://127.0.0.1:9") as client:
        client.pin("bot", tokens=range(100), warm=False)
        result = client.verify("bot")
        assert not result.conclusive
        assert result.live is not None
        assert "no vLLM answers at http://127.0.0.1:9" in result.live.why
    with Client(tmp_path / "s", url="parrot") as client, pytest.raises(InvalidArgumentError):
        client.verify("bot")


def test_a_quarantined_namespace_restores_nothing(kvtier: Client, vllm: FakeVllm) -> None:
    kvtier.pin("bot", text=SECRET)
    kvtier.quarantine("n" * 64, "looks odd")
    num_asked, result = len(vllm.requests), kvtier.verify("bot")
    assert result.live is not None
    assert "quarantined, so nothing is restored: looks odd" in result.live.why
    assert (result.conclusive, len(vllm.requests)) == (False, num_asked)


def test_what_no_engine_has_recognized_cannot_be_verified(kvtier: Client, daemon: FakeCacheService) -> None:
    daemon.num_engines = 0
    kvtier.pin("bot", tokens=range(100), warm=False)
    with pytest.raises(PromptNotBoundError):
        kvtier.verify("bot")


def test_readiness(kvtier: Client, daemon: FakeCacheService) -> None:
    assert kvtier.check_ready().ready
    kvtier.pin("bot", tokens=range(100), warm=False, labels={"team": "sales"})
    readiness = kvtier.check_ready()
    assert (readiness.ready, readiness.num_prompts, readiness.waiting[0].name) == (False, 1, "bot")
    assert not kvtier.wait_ready("bot", timeout_s=0.0).ready
    timer = threading.Timer(0.2, daemon.capture)
    timer.start()
    assert kvtier.wait_ready("bot", timeout_s=30.0).ready
    timer.join()
    assert kvtier.check_ready(selector="team=sales").num_ready == 1
    assert not kvtier.check_ready(selector="team=none").ready, "none is selected, so none can be restored"
    with pytest.raises(PromptNotFoundError):
        kvtier.wait_ready("none", timeout_s=30.0)
    with pytest.raises(InvalidArgumentError, match="cannot go with names"):
        kvtier.check_ready("bot", selector="team=sales")


def test_what_waits_beside_a_refused_prompt_is_waited_for(kvtier: Client, daemon: FakeCacheService) -> None:
    for name in ("refused", "slow"):
        kvtier.pin(name, tokens=range(100), warm=False)
    daemon.refuse("refused", "too long")
    assert not kvtier.check_ready().only_refused
    assert not kvtier.check_ready("slow").only_refused

    def capture() -> None:
        daemon.capture()
        daemon.refuse("refused", "too long")

    timer = threading.Timer(0.2, capture)
    timer.start()
    readiness = kvtier.wait_ready(timeout_s=3600)
    timer.join()
    assert [(each.name, each.state) for each in readiness.waiting] == [("refused", PromptState.REFUSED)]


def test_a_daemon_that_does_not_run_is_waited_for(tmp_path: Path) -> None:
    with Client(tmp_path / "none") as client, pytest.raises(DaemonUnreachableError):
        client.wait_ready(timeout_s=0.2)


def test_events(kvtier: Client, daemon: FakeCacheService) -> None:
    daemon.events.append(Event(name="other"))
    with kvtier.watch_events("pin_registered", timeout_s=30) as events:
        kvtier.pin("bot", tokens=range(100), warm=False)
        event = next(events)
    assert (event.name, event.level, event.fields["name"]) == ("pin_registered", "info", "bot")
    assert list(kvtier.watch_events("none", timeout_s=0.1)) == []


def test_events_for_asyncio(kvtier: Client, tmp_path: Path) -> None:
    kvtier.pin("bot", tokens=range(100), warm=False)

    async def main() -> None:
        async with AsyncClient(tmp_path / "s") as client:
            async for event in client.watch_events("pin_registered", timeout_s=30):
                assert event.fields["name"] == "bot"
                break
            assert (await client.check_ready()).num_prompts == 1

    asyncio.run(main())


def test_a_namespace_is_named_by_the_beginning_of_its_id(kvtier: Client, daemon: FakeCacheService) -> None:
    kvtier.pin("bot", tokens=range(100), warm=False)
    stopped = kvtier.quarantine("nn", "not trusted")
    assert (stopped.namespace_id, stopped.quarantine_reason) == ("n" * 64, "not trusted")
    assert kvtier.release("n" * 12).quarantine_reason == ""
    with pytest.raises(InvalidArgumentError, match="begins the ids of 2 namespaces"):
        kvtier.quarantine("n", "which?")
    with pytest.raises(NamespaceNotFoundError):
        kvtier.release("x")
    assert kvtier.quarantine("n1", "its whole id").namespace_id == "n1"


def test_no_beginning_is_that_of_no_namespace(kvtier: Client, daemon: FakeCacheService) -> None:
    """`kvtier quarantine "$NAMESPACE"`, with the variable unset, stopped the only namespace."""
    with pytest.raises(NamespaceNotFoundError):
        kvtier.quarantine("", "not trusted")
    assert daemon.quarantine_reasons == {}
    with pytest.raises(NamespaceNotFoundError):
        kvtier.evict_all(namespace_id="")
    assert not daemon.evictions
