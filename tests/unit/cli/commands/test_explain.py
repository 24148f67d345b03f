"""`kvtier explain`: a request in a file, token ids, a recent request, the list of them; text, JSON and exit codes."""

import json
import time
from pathlib import Path

import pytest

from kvtier._pb import engine_pb2
from kvtier._pb.cache_pb2 import MissingChunks
from kvtier.cli.commands.operations.explain_requests import _missing
from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier.library.values import outcome_values as outcomes
from kvtier.library.values.conversion import from_message
from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli.conftest import Kvtier
from tests.unit.cli.fake_vllm import FakeVllm

SYSTEM = "You are a parrot. Today is 2026-07-01. Be brief, and repeat what users say to you."
NO_VLLM = ("--url", "http://127.0.0.1:9")


@pytest.fixture
def bot(kvtier: Kvtier, daemon: FakeCacheService, vllm: FakeVllm, tmp_path: Path) -> str:
    """Have a durable prompt; return its pin id."""
    daemon.num_engines, vllm.on_completion = 1, lambda body: daemon.capture()
    (tmp_path / "system.md").write_text(SYSTEM)
    done = kvtier("pin", "bot", "--system", "system.md", "--url", vllm.url)
    assert done.exit_code == 0, done.output
    return daemon.prompts["bot"].pin_id


def chat(path: Path, system: str) -> Path:
    """Write a chat request."""
    turns = [{"role": "system", "content": system}, {"role": "user", "content": "Hello!"}]
    path.write_text(json.dumps({"model": "toy", "messages": turns, "max_tokens": 9}))
    return path


def report(daemon: FakeCacheService, request_id: str, outcome: str, pin_id: str = "") -> None:
    fields = {"prompt_tokens": 90, "shared_tokens": 32, "host_tokens": 16, "ended_unix_s": 1e9}
    daemon.report(engine_pb2.RequestEnded(request_id=request_id, outcome=outcome, pin_id=pin_id, **fields))  # type: ignore[arg-type]


def said(text: str) -> str:
    """Return it as one line."""
    return " ".join(text.split())


@pytest.mark.usefixtures("bot")
def test_a_request_with_another_date(kvtier: Kvtier, vllm: FakeVllm, tmp_path: Path) -> None:
    path = chat(tmp_path / "request.json", SYSTEM.replace("07-01. ", "07-02.\n"))
    for argument, stdin in ((path, None), ("-", path.read_text())):
        done = kvtier("explain", argument, "--url", vllm.url, stdin=stdin)
        assert done.exit_code == 0, done.output
        assert all(len(line) <= 80 for line in done.output.splitlines() if not line.startswith("This looks"))
        text = said(done.output)
        assert "outcome diverged: so it would be" in text
        assert "token 45 is the first that differs" in text
        assert "where it differs from bot:" in text
        assert "before …" in text
        assert "request 2.\\n" in text
        assert "pin 1. Be" in text
        assert "This looks like a date" in text
    answer = json.loads(kvtier("explain", path, "--url", vllm.url, "--json").output)
    assert answer["explanation"]["outcome"] == "DIVERGED"
    assert (answer["difference"]["name"], answer["difference"]["looks_like"]) == ("bot", "DATE")


@pytest.mark.usefixtures("bot")
def test_a_request_that_hits_and_one_that_is_unknown(kvtier: Kvtier, vllm: FakeVllm, tmp_path: Path) -> None:
    done = kvtier("explain", chat(tmp_path / "a.json", SYSTEM), "--url", vllm.url)
    assert "hit: so it would be" in done.output
    assert "differs" not in done.output
    (tmp_path / "b.json").write_text(json.dumps({"prompt": "!" * 100}))
    done = kvtier("explain", tmp_path / "b.json", "--url", vllm.url)
    assert (done.exit_code, "unknown" in done.output, "nearest" in done.output) == (0, True, False)


@pytest.mark.usefixtures("bot")
def test_token_ids_need_no_vllm(kvtier: Kvtier, daemon: FakeCacheService, tmp_path: Path) -> None:
    tokens = [*next(iter(daemon.tokens.values())), 1]
    (tmp_path / "ids.json").write_text(json.dumps(tokens))
    done = kvtier("explain", "--tokens", "ids.json", "--cache-salt", "tenant", *NO_VLLM)
    assert done.exit_code == 0, done.output
    assert f"tokens   {len(tokens)}" in done.output
    (tmp_path / "ids.json").write_text(json.dumps([*tokens[:40], 9, 9]))
    done = kvtier("explain", "--tokens", "ids.json", *NO_VLLM)
    assert "token 40 is the first that differs" in said(done.output)
    assert "where it differs" not in done.output, "no vLLM was asked for text"


def test_a_recent_request(kvtier: Kvtier, daemon: FakeCacheService, bot: str) -> None:
    report(daemon, "cmpl-abc-0", "DIVERGED", bot)
    for request_id in ("cmpl-abc-0", "cmpl-abc", "abc"):
        done = kvtier("explain", "--id", request_id, *NO_VLLM)
        assert done.exit_code == 0, done.output
        text = said(done.output)
        assert "outcome diverged: so it was" in text
        assert "90: 0 from vLLM's prefix cache, 16 from host memory, 0 from disk, the rest computed" in text
        assert "nearest bot: 32 of" in text
    answer = json.loads(kvtier("explain", "--id", "abc", "--json").output)
    assert answer["explanation"]["request"]["pin_name"] == "bot"
    done = kvtier("explain", "--id", "none")
    assert (done.exit_code, "none" in done.output) == (1, True)


def test_the_list_of_recent_requests(kvtier: Kvtier, daemon: FakeCacheService, bot: str) -> None:
    assert "no such request since the daemon started" in kvtier("explain", "--recent").output
    for number, outcome in enumerate(RequestOutcome):
        report(daemon, f"r{number}", outcome.name, bot)
    done = kvtier("explain", "--recent", "--limit", "100")
    assert all(f" {each} " in done.output for each in RequestOutcome), done.output
    assert all(len(line) <= 80 for line in done.output.splitlines())
    listed = json.loads(kvtier("explain", "--recent", "--json").output)
    assert [each["request_id"] for each in listed] == [f"r{number}" for number in reversed(range(len(RequestOutcome)))]
    misses = json.loads(kvtier("explain", "--recent", "--misses", "--json").output)
    assert len(misses) == sum(each.is_miss for each in RequestOutcome)
    some = ("--outcome", "no-slot", "--outcome", "LATE", "--json")
    named = json.loads(kvtier("explain", "--recent", *some).output)
    assert [each["outcome"] for each in named] == ["NO_SLOT", "LATE"]
    assert len(json.loads(kvtier("explain", "--recent", "--limit", "3", "--json").output)) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("a.json", "--recent"),
        ("--id", "x", "--tokens", "ids.json"),
        ("--recent", "--outcome", "unknowable"),
        ("--recent", "--outcome", "unrecognized"),
        ("--recent", "--limit", "0"),
        ("missing.json",),
        ("--recent", "--id", "x"),
        ("--id", "x", "--misses"),
        ("--id", "x", "--outcome", "hit"),
        ("--id", "x", "--limit", "3"),
        ("--id", "x", "--cache-salt", "s"),
    ],
)
def test_wrong_usage(kvtier: Kvtier, daemon: FakeCacheService, arguments: tuple[str, ...]) -> None:
    """Also an option that another form of the command has: it would have no effect."""
    report(daemon, "x", "HIT")
    done = kvtier("explain", *arguments, *NO_VLLM)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("content", ["[1]", "{}", '{"messages": 3}', "no json", '{"prompt": [-1]}'])
def test_a_file_that_holds_no_request(
    kvtier: Kvtier, vllm: FakeVllm, daemon: FakeCacheService, tmp_path: Path, content: str
) -> None:
    (tmp_path / "request.json").write_text(content)
    done = kvtier("explain", "request.json", "--url", vllm.url)
    assert done.exit_code == 2, done.output


def test_exit_codes_without_a_daemon_or_a_vllm(kvtier: Kvtier, tmp_path: Path) -> None:
    chat(tmp_path / "request.json", SYSTEM)
    assert kvtier("explain", "--recent").exit_code == 3
    assert kvtier("explain", "request.json", *NO_VLLM).exit_code == 1


def test_when_and_why_chunks_are_missing(kvtier: Kvtier, daemon: FakeCacheService, tmp_path: Path) -> None:
    daemon.num_engines = 1
    (tmp_path / "ids.json").write_text(json.dumps(list(range(100))))
    done = kvtier("pin", "bot", "--tokens", "ids.json", *NO_VLLM, "--no-warm")
    assert done.exit_code == 0, done.output
    daemon.capture(4)
    assert kvtier("evict", "bot", "--force").exit_code == 0
    result = kvtier("explain", "--tokens", "ids.json")
    assert result.exit_code == 0, result.output
    assert "missing: 4 evicted by command 0s ago, 2 never stored, or lost before what the daemon remembers" in said(
        result.output
    )
    assert all(len(line) <= 80 for line in result.output.splitlines())
    values = json.loads(kvtier("explain", "--tokens", "ids.json", "--json").stdout)
    evicted, never = values["explanation"]["prompts"][0]["bindings"][0]["missing"]
    assert (evicted["cause"], evicted["num_chunks"]) == ("EVICTED_BY_COMMAND", 4)
    assert (never["cause"], never["num_chunks"], never["last_unix_s"]) == ("NOT_RECORDED", 2, 0)
    daemon.capture()
    result = kvtier("explain", "--tokens", "ids.json")
    assert "missing:" not in result.output


def test_each_cause_has_its_words() -> None:
    words = []
    for cause in MissingChunks.Cause.keys():  # noqa: SIM118 - of a class of protobuf
        message = MissingChunks(cause=cause, num_chunks=3, last_unix_s=time.time() - 190)
        words.append(_missing(from_message(outcomes.MissingChunks, message)))
    assert words == [
        "3 lost for a reason that a newer daemon knows 3m ago",
        "3 never stored, or lost before what the daemon remembers",
        "3 evicted by command 3m ago",
        "3 evicted for host memory 3m ago",
        "3 evicted for disk space 3m ago",
        "3 dropped as damaged 3m ago",
    ]
