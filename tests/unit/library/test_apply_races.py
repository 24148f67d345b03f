"""An apply while other clients and engines change the same pins, and what it computes of what it did not render."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier import Client, KvtierError, PromptState
from kvtier.library.declared import DeclaredErrors
from tests.fakes import tcp_daemon
from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli import fake_vllm
from tests.unit.cli.fake_vllm import FakeVllm, plain_template

LONG = "You are a parrot. " * 20
UNUSED_URL = "http://127.0.0.1:9"
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file with these prompts: texts, or whole entries, by name."""

    def write_file(**prompts: str) -> str:
        entries = [each if ":" in each else f"system: '{each}'" for each in prompts.values()]
        lines = [f"- {{name: {name}, {entry}}}\n" for name, entry in zip(prompts, entries, strict=True)]
        path = tmp_path / "prompts.yaml"
        path.write_text("prompts:\n" + "".join(lines))
        return str(path)

    return write_file


def once(vllm: FakeVllm, event: Callable[[], object]) -> None:
    """Let something happen while the first prompt is rendered."""
    happened = threading.Event()

    def template(messages: list[dict[str, Any]], tools: list[Any]) -> str:
        if not happened.is_set():
            happened.set()
            event()
        return plain_template(messages, tools)

    vllm.template = template


def test_a_version_that_is_dropped_meanwhile_fails_alone(
    kvtier: Client, daemon: FakeCacheService, vllm: FakeVllm, write: Write
) -> None:
    """`get` raised behind the commit: no answer, and what came after it was not computed."""
    kvtier.apply(write(bot=LONG, last=LONG + "!"))

    def drop(body: dict[str, Any]) -> None:
        if daemon.prompts.pop("bot@2", None) is not None:
            daemon.prompts["bot"].replacement = ""
        daemon.capture()

    vllm.on_completion = drop
    first, bot = f"system: '{LONG}1', priority: 2", f"system: '{LONG}2', priority: 1"
    done = kvtier.apply(write(first=first, bot=bot, last=LONG + "3"))
    assert [each.name for each in done.refused] == ["bot"]
    assert "is gone: no vLLM could use it" in done.refused[0].why
    assert list(done.incomplete) == []
    assert {name: kvtier.get(name).state for name in ("first", "last")} == dict.fromkeys(
        ("first", "last"), PromptState.DURABLE
    )
    assert kvtier.get("last").replacement == ""


def test_a_pin_that_is_ended_and_evicted_meanwhile_is_not_durable(
    kvtier: Client, daemon: FakeCacheService, vllm: FakeVllm, write: Write
) -> None:
    def evict(body: dict[str, Any]) -> None:
        daemon.prompts.pop("second", None)
        daemon.capture()

    vllm.on_completion = evict
    done = kvtier.apply(write(first=f"system: '{LONG}1', priority: 1", second=LONG))
    assert (list(done.incomplete), list(done.refused)) == (["second"], [])
    assert kvtier.get("first").state is PromptState.DURABLE


def test_a_version_that_takes_the_name_meanwhile_is_computed_under_it(
    kvtier: Client, daemon: FakeCacheService, vllm: FakeVllm, write: Write
) -> None:
    """Its tokens were asked for by the name that it had when it was listed."""
    kvtier.apply(write(bot=LONG))
    kvtier.apply(write(bot=LONG + "!"), warm=False)
    assert kvtier.get("bot").replacement == "bot@2"
    once(vllm, daemon.capture)
    done = kvtier.apply(write(bot=LONG + "!", new=LONG + "?"))
    assert (list(done.incomplete), list(done.refused)) == ([], [])
    assert (kvtier.get("bot").replacement, kvtier.get("new").state) == ("", PromptState.DURABLE)


@pytest.mark.parametrize("model", ["", ", model: toy"])
def test_token_ids_are_computed_too(kvtier: Client, daemon: FakeCacheService, write: Write, model: str) -> None:
    """They were sent, and computed by the next apply only."""
    done = kvtier.apply(write(ids=f"tokens: {list(range(80))}{model}"))
    assert (list(done.incomplete), list(done.refused)) == ([], [])
    assert kvtier.get("ids").state is PromptState.DURABLE
    assert daemon.pins[-1].model == ("toy" if model else ""), "without a model they are for any"
    kvtier.apply(write(more=f"tokens: {list(range(90))}{model}"), dry_run=True)
    with pytest.raises(KeyError):
        daemon.prompts["more"]


def test_token_ids_without_a_vllm_are_sent(daemon: FakeCacheService, tmp_path: Path, write: Write) -> None:
    with Client(tmp_path / "s", url=UNUSED_URL) as client:
        done = client.apply(write(ids=f"tokens: {list(range(80))}"))
        assert (list(done.incomplete), list(done.refused)) == ([], [])
        assert client.get("ids").state is PromptState.CAPTURING


def test_what_waits_and_is_pinned_otherwise_is_computed_at_once(
    kvtier: Client, daemon: FakeCacheService, write: Write
) -> None:
    """Another TTL left it to the next apply."""
    kvtier.apply(write(bot=LONG, ids=f"tokens: {list(range(80))}"), warm=False)
    path = write(bot=f"system: '{LONG}', ttl: 3d", ids=f"tokens: {list(range(80))}, priority: 3")
    done = kvtier.apply(path)
    assert [change.kind.value for change in done.changes] == ["update", "update"]
    assert (list(done.incomplete), list(done.refused)) == ([], [])
    assert {prompt.state for prompt in kvtier.list()} == {PromptState.DURABLE}
    assert not kvtier.apply(path).changed


def test_a_pin_that_another_client_replaced_since_is_not_overwritten(tmp_path: Path, write: Write) -> None:
    with (
        tcp_daemon.serving(tmp_path) as daemon,
        fake_vllm.serving(FakeVllm()) as vllm,
        Client(daemon.config.server.socket, url=vllm.url) as client,
    ):
        client.apply(write(bot=LONG, other=LONG), warm=False)
        once(vllm, lambda: daemon.local.pin("bot", tokens=range(100), replace=True, warm=False))
        path = write(bot=LONG + "!", other=LONG + "!")
        with pytest.raises(DeclaredErrors, match=r"prompts.yaml:2:3: bot: its pin was replaced, ended or moved"):
            client.apply(path, warm=False)
        assert client.tokens("bot") == tuple(range(100))
        assert client.get("other").recipe["content"] == LONG
        client.apply(path, warm=False)
        assert client.get("bot").recipe["content"] == LONG + "!"


def test_a_source_that_vllm_renders_meanwhile_is_no_reason_to_refuse(tmp_path: Path, write: Write) -> None:
    """It gets another id, though no one replaced it."""
    with tcp_daemon.serving(tmp_path) as daemon, fake_vllm.serving(FakeVllm()) as vllm:
        socket, path = daemon.config.server.socket, write(bot=LONG)
        with Client(socket, url=UNUSED_URL) as client:
            client.apply(path)
            before = client.get("bot").pin_id
        with Client(socket, url=vllm.url) as client, Client(socket, url=vllm.url) as other:
            once(vllm, lambda: other.pin("bot", system=LONG, model="toy", warm=False))
            client.apply(path, warm=False)
            assert client.get("bot").pin_id != before
            assert client.get("bot").num_tokens


@pytest.fixture
def real(tmp_path: Path) -> Iterator[tuple[Client, FakeVllm, Client]]:
    """Yield a client of a real daemon, its vLLM, and a client of another team."""
    with (
        tcp_daemon.serving(tmp_path, tls=False, listen="off") as daemon,
        fake_vllm.serving(FakeVllm()) as vllm,
        Client(daemon.config.server.socket, url=vllm.url) as client,
    ):
        yield client, vllm, daemon.local


def files(tmp_path: Path, team: str, **prompts: str) -> str:
    """Write the file of a team, with a set of its name."""
    path = tmp_path / f"{team}.yaml"
    lines = [f"- {{name: {name}, {entry}}}\n" for name, entry in prompts.items()]
    path.write_text(f"set: {team}\nprompts:{'' if lines else ' []'}\n" + "".join(lines))
    return str(path)


SYSTEM_OF_NEW = f"system: '{LONG}new'"
TOKENS, OTHER_TOKENS = f"tokens: {list(range(80))}", f"tokens: {list(range(100))}"


@pytest.mark.parametrize("taken", [TOKENS, OTHER_TOKENS], ids=["as it is", "with other content"])
def test_what_another_set_takes_over_meanwhile_is_not_pruned(
    tmp_path: Path, real: tuple[Client, FakeVllm, Client], taken: str
) -> None:
    """Only names were sent: the pin of the other team ended."""
    client, vllm, other = real
    client.apply(files(tmp_path, "a", bot=TOKENS), warm=False)
    once(vllm, lambda: other.apply(files(tmp_path, "b", bot=taken), take_over=True, warm=False))
    path = files(tmp_path, "a", new=SYSTEM_OF_NEW)
    with pytest.raises(KvtierError, match="bot: its pin was replaced, ended or moved to another set since it was"):
        client.apply(path, prune=True, warm=False)
    assert [(each.name, each.pinned, each.labels) for each in client.list()] == [("bot", True, {"kvtier/set": "b"})]
    client.apply(path, prune=True, warm=False)
    assert [(each.name, each.pinned) for each in client.list()] == [("bot", True), ("new", True)]


def test_what_is_forgotten_and_pinned_again_meanwhile_is_not_pruned(
    tmp_path: Path, real: tuple[Client, FakeVllm, Client]
) -> None:
    client, vllm, other = real
    client.apply(files(tmp_path, "a", bot=TOKENS), warm=False)

    def pin_again() -> None:
        other.unpin("bot")
        other.evict("bot")
        other.pin("bot", tokens=range(100), warm=False)

    once(vllm, pin_again)
    with pytest.raises(KvtierError, match="bot: its pin was replaced"):
        client.apply(files(tmp_path, "a", new=SYSTEM_OF_NEW), prune=True, warm=False)
    assert [(each.name, each.pinned) for each in client.list()] == [("bot", True)]


@pytest.mark.parametrize("how", ["priority: 3", "system: 'You are another parrot.'"], ids=["update", "replace"])
def test_what_another_set_takes_over_meanwhile_is_not_taken_back(
    tmp_path: Path, real: tuple[Client, FakeVllm, Client], how: str
) -> None:
    """Its id stays at a take-over, and was all that was compared: the label was put back."""
    client, vllm, other = real
    client.apply(files(tmp_path, "a", bot=TOKENS), warm=False)
    once(vllm, lambda: other.apply(files(tmp_path, "b", bot=TOKENS), take_over=True, warm=False))
    changed = f"{TOKENS}, {how}" if "priority" in how else how
    path = files(tmp_path, "a", bot=changed, new=SYSTEM_OF_NEW)
    with pytest.raises(DeclaredErrors, match=r"a.yaml:3:3: bot: its pin was replaced, ended or moved to another set"):
        client.apply(path, warm=False)
    assert [(each.name, each.labels) for each in client.list()] == [("bot", {"kvtier/set": "b"})]
    with pytest.raises(DeclaredErrors, match="belongs to the set 'b'"):
        client.apply(path, warm=False)


def test_a_name_that_another_team_pins_meanwhile_is_not_replaced(
    tmp_path: Path, real: tuple[Client, FakeVllm, Client]
) -> None:
    client, vllm, other = real
    for pin_it in (
        lambda: other.pin("new", tokens=range(100), warm=False),
        lambda: other.apply(files(tmp_path, "b", new=OTHER_TOKENS), warm=False),
    ):
        once(vllm, pin_it)
        with pytest.raises(DeclaredErrors, match=r"a.yaml:3:3: new: it was pinned by another client since it was com"):
            client.apply(files(tmp_path, "a", new=SYSTEM_OF_NEW), warm=False)
        assert client.tokens("new") == tuple(range(100))
        client.unpin("new")
        client.evict("new")


def test_the_same_files_may_be_applied_twice_at_once(tmp_path: Path, real: tuple[Client, FakeVllm, Client]) -> None:
    """On each host of a fleet, say."""
    client, vllm, other = real
    path = files(tmp_path, "a", new=SYSTEM_OF_NEW, ids=TOKENS)
    once(vllm, lambda: other.apply(path, warm=False))
    client.apply(path, warm=False)
    assert not client.apply(path, warm=False).changed


def test_the_same_files_of_no_set_may_be_applied_twice_at_once(
    tmp_path: Path, real: tuple[Client, FakeVllm, Client]
) -> None:
    """What both made was refused to the second one."""
    client, vllm, other = real
    path = tmp_path / "plain.yaml"
    path.write_text(f"prompts:\n- {{name: new, {SYSTEM_OF_NEW}}}\n- {{name: ids, {TOKENS}}}\n")
    once(vllm, lambda: other.apply(str(path), warm=False))
    client.apply(str(path), warm=False)
    assert not client.apply(str(path), warm=False).changed


@pytest.mark.parametrize("is_forgotten", [False, True], ids=["ended", "forgotten"])
def test_what_both_prune_may_have_ended(
    tmp_path: Path, real: tuple[Client, FakeVllm, Client], is_forgotten: bool
) -> None:
    """Of two jobs with --prune the second one was refused as a whole; so it was when a TTL ended the pin."""
    client, vllm, other = real
    client.apply(files(tmp_path, "a", bot=TOKENS, old=OTHER_TOKENS), warm=False)
    path = files(tmp_path, "a", bot=TOKENS, new=SYSTEM_OF_NEW)

    def prune() -> None:
        other.apply(path, prune=True, warm=False)
        if is_forgotten:
            other.evict("old")

    once(vllm, prune)
    client.apply(path, prune=True, warm=False)
    assert sorted(each.name for each in client.list() if each.pinned) == ["bot", "new"]
    assert not client.apply(path, prune=True, warm=False).changed


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "unrendered"])
def test_older_files_replace_nothing_that_they_were_not_compared_with(tmp_path: Path, is_there: bool) -> None:
    """A new name of the same set, and a source that was not rendered yet, stood for any content."""
    with tcp_daemon.serving(tmp_path) as daemon, fake_vllm.serving(FakeVllm()) as vllm:
        socket = daemon.config.server.socket
        if is_there:
            with Client(socket, url=UNUSED_URL) as client:
                client.apply(files(tmp_path, "a", bot=f"system: '{LONG}0'"))
        with Client(socket, url=vllm.url) as client, Client(socket, url=vllm.url) as other:
            newer = tmp_path / "newer"
            newer.mkdir()
            once(vllm, lambda: other.apply(files(newer, "a", bot=f"system: '{LONG}2'"), warm=False))
            how = "its pin was replaced" if is_there else "it was pinned by another client"
            with pytest.raises(DeclaredErrors, match=f"bot: {how}"):
                client.apply(files(tmp_path, "a", bot=f"system: '{LONG}1'"), warm=False)
            assert client.get("bot").recipe["content"] == f"{LONG}2"


def test_a_pin_whose_version_another_set_has_is_of_that_set(
    kvtier: Client, daemon: FakeCacheService, tmp_path: Path
) -> None:
    """Until the version was durable its pin had the old label, by which --prune ended both."""
    kvtier.apply(files(tmp_path, "a", bot=TOKENS))
    kvtier.apply(files(tmp_path, "b", bot=OTHER_TOKENS), take_over=True, warm=False)
    assert kvtier.get("bot").replacement == "bot@2"
    none = files(tmp_path, "a", mine=TOKENS)
    assert kvtier.apply(none, dry_run=True).not_in_files == []
    kvtier.apply(none, prune=True, warm=False)
    assert kvtier.get("bot").pinned
    assert kvtier.get("bot").replacement == "bot@2"
    assert kvtier.apply(files(tmp_path, "b", mine2=TOKENS), dry_run=True).not_in_files == ["bot"]
