"""The warm start: which prompts, in which order, when not, and that it ends. Against a fake daemon and a fake vLLM."""

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier._pb import engine_pb2 as pb
from kvtier._pb.cache_pb2 import PinRequest, PromptBinding, PromptStatus
from kvtier.client.engine_session import Attachment
from kvtier.client.warm_requests import is_warm_request, new_request_id, warm_tokens
from kvtier_connector.engine.facts import EngineFacts
from kvtier_connector.own_api import warm_start
from kvtier_connector.own_api.engine_api_client import ApiGoneError, EngineApiClient
from kvtier_connector.own_api.warm_start import WarmStart
from kvtier_connector.settings import parse_settings
from tests.fakes import fake_cache_service
from tests.fakes.fake_cache_service import FakeCacheService
from tests.fakes.waiting import wait_for
from tests.unit.cli import fake_vllm
from tests.unit.cli.fake_vllm import FakeVllm
from tests.unit.connector.harness import full_spec, kv_cache_config_of, sliding_spec, vllm_config_of

NAMESPACE = "n" * 64
BLOCK_TOKENS = 32


class Rig:
    """A warm start with its fakes.

    Attributes:
        cache: What vLLM's index of its cache is; put another one here to reset it.
        serves_users: Whether a user's request is open.
        settings: More of the connector's.
    """

    def __init__(self, daemon: FakeCacheService, vllm: FakeVllm, socket: Path) -> None:
        self.daemon, self.vllm, self.socket = daemon, vllm, socket
        self.cache: object = object()
        self.serves_users = False
        self.started: list[WarmStart] = []
        self.settings: dict[str, Any] = {}
        self.find_api_server: Callable[[], str | None] = lambda: None

    def pin(self, name: str, num_tokens: int = 100, priority: int = 0, held: bool = True, **fields: Any) -> None:
        """Pin a prompt whose tokens all are its number; the daemon holds it, or half of it."""
        number = len(self.daemon.prompts)
        self.daemon.pins.append(PinRequest(name=name, tokens=[number] * num_tokens))
        num_chunks = num_tokens // 16
        binding = PromptBinding(
            namespace_id=NAMESPACE,
            num_chunks=num_chunks,
            covered_tokens=num_chunks * 16,
            num_host_chunks=num_chunks // 2,
            num_durable_chunks=num_chunks if held else num_chunks // 2,
        )
        known: dict[str, Any] = {
            "pin_id": name,
            "pinned": True,
            "bindings": [binding],
            "created_unix_s": number,
            "tokens_digest": str(number),
        } | fields
        status = PromptStatus(name=name, num_tokens=num_tokens, priority=priority, **known)
        self.daemon.prompts[name] = status

    def start(self, *, by_priority: bool = False, cache_tokens: int = 10_000) -> WarmStart:
        """Begin, as if the first session had bound its pins."""
        facts: Any = SimpleNamespace(
            settings=parse_settings({"socket": str(self.socket), "warm_url": self.vllm.url} | self.settings),
            vllm_config=SimpleNamespace(
                cache_config=SimpleNamespace(block_size=BLOCK_TOKENS),
                scheduler_config=SimpleNamespace(policy="priority" if by_priority else "fcfs"),
            ),
            model_names=["toy", "/models/toy"],
            cache_tokens=lambda: cache_tokens,
        )
        made = WarmStart(facts, "secret", lambda: self.find_api_server())
        made.watch(lambda: self.serves_users, lambda: self.cache)
        self.started.append(made)
        made.bound(Attachment(Any, 0, pb.Welcome(namespace_id=NAMESPACE)))  # type: ignore[arg-type]
        return made

    def completions(self) -> list[dict[str, Any]]:
        return [body for path, body in self.vllm.requests if path == "/v1/completions"]

    def warmed(self) -> list[int]:
        """Return the numbers of the prompts that were asked for."""
        return [body["prompt"][0] for body in self.completions()]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(warm_start, "POLL_S", 0.005)
    monkeypatch.setattr(warm_start, "SLOW_POLL_S", 0.005)
    with (
        fake_vllm.serving(FakeVllm()) as vllm,
        fake_cache_service.serving(FakeCacheService(), tmp_path / "s") as daemon,
    ):
        made = Rig(daemon, vllm, tmp_path / "s")
        yield made
        for started in made.started:
            started.close()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[str], Callable[[], bool]]:
    """Return a condition: that the log has these words."""
    caplog.set_level(logging.INFO, logger="kvtier_connector")
    return lambda words: lambda: words in caplog.text


Said = Callable[[str], Callable[[], bool]]


def test_held_prompts_of_this_engine_by_priority_then_the_newest_first(rig: Rig, said: Said) -> None:
    rig.pin("old")
    rig.pin("new")
    rig.pin("first", priority=1)
    rig.pin("half", held=False)
    rig.pin("ended", pinned=False)
    rig.pin("of another model", model="other")
    rig.pin("elsewhere", bindings=[PromptBinding(namespace_id="m" * 64, num_chunks=1, num_host_chunks=1)])
    rig.pin("tuned", model="/models/toy", lora_name="tuned", cache_salt="pepper", priority=-1)
    rig.start()
    wait_for(said("warm start ended prompts=4 of 4 tokens=400 failed=0"))
    assert rig.warmed() == [2, 1, 0, 7]
    last = rig.completions()[-1]
    assert (last["model"], last["cache_salt"], last["max_tokens"]) == ("tuned", "pepper", 1)
    assert is_warm_request(f"cmpl-{last['request_id']}-0-abcd")
    assert all("priority" not in body for body in rig.completions()), "without the policy vLLM refuses the field"
    assert said("warm start began prompts=4 tokens=400")()


def test_several_names_of_one_prompt_are_one_request(rig: Rig, said: Said) -> None:
    rig.pin("salted", tokens_digest="d", cache_salt="pepper")
    rig.pin("a", tokens_digest="d")
    rig.pin("b", tokens_digest="d")
    rig.start(cache_tokens=512)  # space for two
    wait_for(said("warm start ended prompts=2 of 2"))
    assert rig.warmed() == [2, 0], "further names of one prompt took the space of others"


def test_its_requests_come_last_where_vllm_schedules_by_priority(rig: Rig, said: Said) -> None:
    rig.pin("p")
    rig.start(by_priority=True)
    wait_for(said("warm start ended"))
    assert rig.completions()[0]["priority"] == 2**31 - 1


def test_no_more_than_the_share_of_the_cache(rig: Rig, said: Said) -> None:
    """Of 256 tokens 128 are taken by the first one's whole blocks; the next would need 160, and the last fits."""
    for name, num_tokens, priority in [("a", 100, 2), ("b", 130, 1), ("c", 128, 0)]:
        rig.pin(name, num_tokens, priority)
    rig.start(cache_tokens=512)
    wait_for(said("warm start ended prompts=2 of 2"))
    assert rig.warmed() == [0, 2]
    assert said("warm start leaves out name=b tokens=130: half of vLLM's cache leaves 128")()


def test_it_waits_for_the_server_and_while_users_are_served(rig: Rig, said: Said) -> None:
    rig.pin("p")
    rig.serves_users = True
    rig.vllm.statuses["/health"] = 503
    rig.start()
    wait_for(lambda: len(rig.vllm.requests) > 2)
    assert not said("warm start began")()
    del rig.vllm.statuses["/health"]
    wait_for(said("warm start began"))
    assert rig.completions() == []
    rig.serves_users = False
    wait_for(said("warm start ended prompts=1 of 1"))


def test_between_two_prompts_users_go_first(rig: Rig, said: Said) -> None:
    def a_user_comes(body: dict[str, Any]) -> None:
        rig.serves_users = True

    rig.pin("a")
    rig.pin("b")
    rig.vllm.on_completion = a_user_comes
    started = rig.start()
    wait_for(lambda: rig.serves_users)
    started.close()
    assert rig.warmed() == [1]


def test_a_cache_that_was_emptied_is_warmed_again(rig: Rig, said: Said) -> None:
    rig.pin("p")
    rig.start()
    wait_for(said("warm start ended"))
    rig.cache = object()
    wait_for(lambda: rig.warmed() == [0, 0])


def test_after_a_reset_of_kvtier_nothing_of_the_old_namespace_is_asked_for(rig: Rig, said: Said) -> None:
    """vLLM may be asleep; the new session's namespace holds nothing."""

    def reset(body: dict[str, Any]) -> None:
        rig.cache = object()
        rig.started[-1].reset()

    rig.pin("a")
    rig.pin("b")
    rig.vllm.on_completion = reset
    started = rig.start()
    wait_for(said("warm start ended prompts=1 of 2 tokens=100 failed=0"))
    assert said("kvtier was reset")()
    started.bound(Attachment(Any, 0, pb.Welcome(namespace_id=NAMESPACE)))  # type: ignore[arg-type]
    started.bound(Attachment(Any, 1, pb.Welcome(namespace_id="e" * 64)))  # type: ignore[arg-type]
    wait_for(said("nothing to load; the daemon holds no KV of pins"))
    assert rig.warmed() == [1]


def test_a_daemon_that_comes_back_is_no_start(rig: Rig, said: Said) -> None:
    rig.pin("p")
    started = rig.start()
    wait_for(said("warm start ended"))
    started.bound(Attachment(Any, 0, pb.Welcome(namespace_id=NAMESPACE)))  # type: ignore[arg-type]
    rig.cache = object()
    wait_for(lambda: len(rig.warmed()) == 2)
    assert rig.warmed() == [0, 0], "once at the start, once after the reset"


def test_a_wrong_key_is_named_once(rig: Rig, said: Said, caplog: pytest.LogCaptureFixture) -> None:
    rig.pin("a")
    rig.pin("b")
    rig.vllm.statuses["/v1/completions"] = 401
    started = rig.start()
    wait_for(said("set VLLM_API_KEY in vLLM's environment"))
    wait_for(lambda: not started._thread.is_alive())
    assert caplog.text.count("VLLM_API_KEY") == 1
    assert started.take_failures() == 1
    assert started.take_failures() == 0


def test_a_prompt_that_is_refused_does_not_keep_the_others_cold(rig: Rig, said: Said) -> None:
    def refuse(body: dict[str, Any]) -> None:
        if body["prompt"][0] == 1:
            raise fake_vllm.RefusedError("too long")

    rig.pin("a")
    rig.pin("b")
    rig.vllm.on_completion = refuse
    started = rig.start()
    wait_for(said("warm start ended prompts=1 of 2 tokens=100 failed=1"))
    assert said("refuses to warm b (400: ")()
    assert started.take_failures() == 1


def test_a_prompt_that_is_gone_meanwhile_does_not_keep_the_others_cold(rig: Rig, said: Said) -> None:
    def end_b(body: dict[str, Any]) -> None:
        rig.daemon.prompts.pop("b", None)

    for name in "abc":
        rig.pin(name)
    rig.vllm.on_completion = end_b
    rig.start()
    wait_for(said("warm start ended prompts=2 of 3 tokens=200 failed=0"))
    assert said("b is not warmed")()
    assert rig.warmed() == [2, 0]


def test_without_a_daemon_it_says_so_and_ends(rig: Rig, said: Said) -> None:
    rig.socket = rig.socket.with_name("none")
    rig.start()
    wait_for(said("the warm start of http://127.0.0.1"))
    assert rig.completions() == []


def test_a_server_that_goes_away_ends_the_round(rig: Rig, said: Said) -> None:
    def hang_up(body: dict[str, Any]) -> None:
        raise fake_vllm.HangUpError

    rig.pin("a")
    rig.pin("b")
    rig.vllm.on_completion = hang_up
    rig.start()
    wait_for(said("warm start ended prompts=0 of 2 tokens=0 failed=1 seconds="))
    assert len(rig.warmed()) == 1


def test_a_server_that_never_is_healthy_is_reported(rig: Rig, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "TIMEOUT_S", 0.05)
    rig.pin("a")
    rig.vllm.statuses["/health"] = 503
    rig.start()
    wait_for(said("is warm_url right?"))


def test_a_server_is_found_by_itself(rig: Rig, said: Said) -> None:
    rig.settings["warm_url"] = "auto"
    rig.pin("a")
    rig.start()
    assert rig.warmed() == []
    rig.find_api_server = lambda: rig.vllm.url
    wait_for(lambda: rig.warmed() == [0])
    wait_for(said(f"the API server of this vLLM is {rig.vllm.url}"))


def test_a_server_that_is_not_found_is_reported(rig: Rig, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "TIMEOUT_S", 0.05)
    rig.settings["warm_url"] = "auto"
    rig.start()
    wait_for(said("found no API server of this vLLM; set warm_url to its URL"))


def test_a_close_ends_the_request_that_it_waits_for(rig: Rig, said: Said) -> None:
    released = threading.Event()

    def hang(body: dict[str, Any]) -> None:
        released.wait(30)

    rig.vllm.on_completion = hang
    rig.pin("a")
    started = rig.start()
    wait_for(lambda: len(rig.completions()) == 1)
    started.close(timeout_s=10)
    assert not started._thread.is_alive()
    released.set()


def test_a_closed_api_answers_no_request(rig: Rig) -> None:
    api = EngineApiClient(rig.vllm.url, "")
    assert api.is_healthy()
    api.close()
    assert not api.is_healthy()
    with pytest.raises(ApiGoneError):
        api.complete({}, 1.0)


def test_how_many_tokens_vllms_cache_takes() -> None:
    config, unused = vllm_config_of(), SimpleNamespace()
    facts = EngineFacts(
        settings=parse_settings({"socket": "/s"}),
        vllm_config=config,
        kv_cache_config=kv_cache_config_of([full_spec(), sliding_spec(8)], num_blocks=64),
        offloading=unused,
        group_configs=(),
    )
    assert facts.model_names == ["llama", "/models/llama"]
    assert facts.cache_tokens() == 64 * 4 // 2, "both groups take of the same blocks"
    config.cache_config.kv_cache_size_tokens = 999
    assert facts.cache_tokens() == 999, "vLLM knows better, once it has computed it"


def test_a_prompt_that_ends_with_a_chunk_is_asked_for_with_one_token_more() -> None:
    """vLLM always computes the last token, and the chunk with it: the last chunk would stay where it is."""
    tokens = list(range(48))
    for covered_tokens, num_asked in [(48, 49), (32, 48), (0, 48)]:
        status = PromptStatus(bindings=[PromptBinding(covered_tokens=covered_tokens)])
        asked = warm_tokens(status, tokens)
        assert (len(asked), asked[:48]) == (num_asked, tokens)
    assert not is_warm_request("cmpl-1234-0")
    assert new_request_id() != new_request_id()
