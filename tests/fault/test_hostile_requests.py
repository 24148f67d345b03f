"""What clients can make an engine say: prompts, owners, names, TTLs and places without end, to a real daemon.

The daemon takes no more memory and makes no more pins than its bounds say, refuses the rest by field, answers operators
meanwhile, and finds its files after a restart.
"""

import asyncio
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from kvtier.client.address import channel_target
from kvtier.config import DaemonConfig
from kvtier.core import limits
from kvtier.discovery.saved_traffic import FOLDER_NAME
from tests.fakes.daemon_process import daemon_process, flags_of
from tests.fakes.fsck import assert_clean_online
from tests.fakes.operator import Stub, status_of, until
from tests.fakes.process_facts import held
from tests.fakes.scripted_engine import DEADLINE_S, ScriptedEngine, chunk_key, config_in
from tests.unit.service.test_auto_pins import counts_are_loaded

MIB = 1024**2
FLOOD = int(os.environ.get("KVTIER_CHAOS_FLOOD", "1"))
"""How many times as much; `make chaos` sends 20 million prefixes and asks for 100,000 owners."""
PER_MESSAGE = limits.MAX_SEEN_REQUESTS
NUM_OPEN = 60
NEW_PER_MINUTE = 300
OWNER = "0" * 16
HOSTILE = "\x1b[2J\x1b]0;evil\x07\r\nINJECTED \u202e\u2066<b>[red]"
PINNED = pb.RequestPinResult.PINNED


@asynccontextmanager
async def serving(config: DaemonConfig, log: Path) -> AsyncIterator[tuple[int, Stub]]:
    """Run a daemon that pins prompts of 32 tokens by itself; yield its pid and an operator's stub."""
    command = ["env", "TUNED_CACHE_AUTO_PIN_MIN_TOKENS=32", "TUNED_DISK_PACK_LINGER_S=0.01", sys.executable]
    command += ["-m", "benchmarks.harness.tuned_daemon", *flags_of(config), "--http-listen=off"]
    with daemon_process(command, log) as process:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(channel_target(config.server.socket), options=options) as channel:
            yield process.pid, Stub(channel)


async def while_answering(stub: Stub, work: Awaitable[None]) -> None:
    """Do something, and ask for the daemon's status again and again meanwhile: each is answered before a deadline."""
    num_answered = 0

    async def ask() -> None:
        nonlocal num_answered
        while True:
            await stub.GetStatus(cache_pb2.GetStatusRequest(), timeout=DEADLINE_S)
            num_answered += 1
            await asyncio.sleep(0.05)

    asking = asyncio.create_task(ask())
    await work
    assert not asking.done(), "a status was not answered"
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking
    assert num_answered > 5


def grown(num_bytes: int) -> int:
    """Print by how much memory has grown (`-rP` shows it), and return it."""
    print(f"grown by {num_bytes / MIB:.1f} MiB")
    return num_bytes


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(scenario())


# Prompts that come once


def single_requests(first: int) -> pb.RequestsSeen:
    """A message of requests that have nothing in common, with four prefixes each."""
    requests = [
        pb.SeenRequest(
            prefixes=[
                pb.SeenPrefix(digest=(4 * number + k).to_bytes(16, "big"), num_tokens=1024 << k) for k in range(4)
            ],
            prompt_digest=number,
            num_tokens=20_000,
        )
        for number in range(first, first + PER_MESSAGE)
    ]
    return pb.RequestsSeen(requests=requests, num_skipped=1)


async def flood(engine: ScriptedEngine, numbers: Iterable[int]) -> None:
    for number in numbers:
        await engine.send(requests_seen=single_requests(number * PER_MESSAGE))
        await engine.barrier()


@pytest.mark.timeout(120 * FLOOD)
def test_a_million_prefixes_that_come_once_grow_nothing_and_pin_nothing(tmp_path: Path) -> None:
    config, num_messages = config_in(tmp_path), 245 * FLOOD

    async def scenario() -> None:
        async with serving(config, tmp_path / "log") as (pid, stub), ScriptedEngine(config) as engine:
            await until(lambda: counts_are_loaded(stub))  # what comes before is skipped
            await flood(engine, range(10))
            before = held(pid, config.host.arena_dir).private_bytes
            await while_answering(stub, flood(engine, range(10, num_messages)))
            assert grown(held(pid, config.host.arena_dir).private_bytes - before) < 16 * MIB
            status = await status_of(stub)
            assert status.counters["requests_observed"] == num_messages * PER_MESSAGE
            assert status.num_prompts == 0
            (namespace,) = (await stub.GetAdvice(cache_pb2.GetAdviceRequest())).namespaces
            assert not namespace.prefixes
        (sketch,) = (config.disk.disk_dir / FOLDER_NAME).glob("*.sketch")
        assert sketch.stat().st_size < 400_000

    run(scenario)


# Pins without end


def asked(number: int, *, num_tokens: int = 64, with_tokens: bool = True, ttl_s: int = 300, **fields: Any) -> Any:
    """An owner of its own asks for a prompt of its own."""
    prefix = pb.RequestedPrefix(digest=chunk_key(number)[:16], num_tokens=num_tokens, ttl_s=ttl_s)
    usual: dict[str, Any] = {"id": number, "prefixes": [prefix], "owner": f"{number:016x}"}
    tokens = range(number * 100, number * 100 + num_tokens) if with_tokens else ()
    return pb.RequestPins(**usual | {"tokens": tokens} | fields)


async def ask_all(engine: ScriptedEngine, asks: Iterator[pb.RequestPins]) -> list[int]:
    """Ask as fast as the daemon takes it; return what became of each."""
    states: list[int] = []
    while part := list(itertools.islice(asks, NUM_OPEN)):
        for ask in part:
            await engine.send(request_pins=ask)
        for _ in part:
            answer = (await engine.receive("request_pins_answer")).request_pins_answer
            states += [result.state for result in answer.results]
        engine._unread.clear()
    return states


def ledger_bytes(config: DaemonConfig) -> int:
    return sum(path.stat().st_size for path in config.disk.disk_dir.glob("ledger.sqlite*"))


@pytest.mark.timeout(120 * FLOOD)
def test_owners_and_ttls_without_end_make_as_many_pins_as_the_limits_say(tmp_path: Path) -> None:
    """One owner that asks for more than its share does not shut out the others."""
    config = config_in(tmp_path)

    async def scenario() -> None:
        async with serving(config, tmp_path / "log") as (pid, stub), ScriptedEngine(config) as engine:
            began_s, ttls = time.monotonic(), itertools.cycle([3600, 10**6, limits.TTL_S.most])
            greedy = (asked(number, owner=OWNER, ttl_s=next(ttls)) for number in range(1, 501))
            num_greedy = (await ask_all(engine, greedy)).count(PINNED)
            refilled = (time.monotonic() - began_s) * NEW_PER_MINUTE / 60
            assert NEW_PER_MINUTE <= num_greedy <= NEW_PER_MINUTE + refilled + 1
            assert set(await ask_all(engine, (asked(number, ttl_s=3600) for number in range(1001, 1041)))) == {PINNED}
            num_pinned = num_greedy + 40
            assert num_pinned == (await status_of(stub)).num_prompts
            before = held(pid, config.host.arena_dir).private_bytes, ledger_bytes(config)

            async def storm() -> None:
                strangers = (asked(number, with_tokens=False) for number in range(10**6, 10**6 + 5000 * FLOOD))
                assert PINNED not in await ask_all(engine, strangers)
                again = (asked(1001 + number % 10, with_tokens=False, ttl_s=1 + number**2) for number in range(2000))
                assert set(await ask_all(engine, again)) == {PINNED}

            await while_answering(stub, storm())
            status = await status_of(stub)
            assert status.num_prompts == num_pinned
            assert status.counters["request_pins_extended"] < 800, "of 2,000 uses: each goes a quarter beyond"
            print(f"{num_greedy} of 500 pinned; {status.counters['request_pins_extended']} of 2,000 uses written")
            assert grown(held(pid, config.host.arena_dir).private_bytes - before[0]) < 16 * MIB
            assert ledger_bytes(config) - before[1] < MIB
            assert len(list((config.disk.disk_dir / "promises").iterdir())) == num_pinned
        async with serving(config, tmp_path / "log-2") as (_, stub):
            assert (await status_of(stub)).num_prompts == num_pinned
            await assert_clean_online(stub)
        refusals = (tmp_path / "log").read_text().count("request_pins_refused")
        assert refusals < 20, "at most one line in ten seconds"

    run(scenario)


def many_prefixes(num_tokens: int) -> Sequence[pb.RequestedPrefix]:
    return [pb.RequestedPrefix(digest=chunk_key(end)[:16], num_tokens=end, ttl_s=1) for end in range(1, num_tokens + 1)]


TOO_MUCH: dict[str, Callable[[], dict[str, Any]]] = {
    "request_pins.prefixes = '100000 of them'": lambda: {
        "request_pins": asked(1, num_tokens=100_000, prefixes=many_prefixes(100_000))
    },
    "name = ": lambda: {"request_pins": asked(1, name="n" * MIB)},
    "request_pins.owner = ": lambda: {"request_pins": asked(1, owner="0" * MIB)},
    "request_pins.cache_salt = ": lambda: {"request_pins": asked(1, cache_salt=HOSTILE * 100_000)},
    "request_pins.prefixes.digest = '1048576 bytes'": lambda: {
        "request_pins": asked(1, prefixes=[pb.RequestedPrefix(digest=bytes(MIB), num_tokens=64, ttl_s=1)])
    },
    "request_pins.tokens = 64": lambda: {
        "request_pins": asked(1, prefixes=[pb.RequestedPrefix(digest=bytes(16), num_tokens=63, ttl_s=1)])
    },
    "requests_seen.digest = '1048576 bytes'": lambda: {
        "requests_seen": pb.RequestsSeen(
            requests=[pb.SeenRequest(prefixes=[pb.SeenPrefix(digest=bytes(MIB), num_tokens=1)])]
        )
    },
    "changing_middle.before = ": lambda: {
        "changing_middle": pb.ChangingMiddle(num_prompts=9, before=HOSTILE * 100_000)
    },
    "prefix_tokens.lora_path = ": lambda: {
        "prefix_tokens": pb.PrefixTokens(digest=bytes(16), tokens=range(64), lora_path="/" * MIB)
    },
    "demote.owner = ": lambda: {"demote": pb.Demote(digest=bytes(16), owner=HOSTILE * 1000)},
}


def test_what_is_too_much_ends_the_session_by_field_and_no_other(tmp_path: Path) -> None:
    config = config_in(tmp_path)

    async def sent(engine: ScriptedEngine, message: dict[str, Any]) -> None:
        await engine.send(**message)
        await engine.receive("pong")

    async def refused(field: str, message: dict[str, Any]) -> None:
        async with ScriptedEngine(config, engine_id="hostile") as engine:
            with pytest.raises((EOFError, grpc.aio.AioRpcError)) as ended:
                await sent(engine, message)
        error = ended.value
        text = str(error.details()) if isinstance(error, grpc.aio.AioRpcError) else str(error)
        assert field in text
        assert len(text) < 2100
        assert text.isprintable()

    async def scenario() -> None:
        async with serving(config, tmp_path / "log") as (_, stub), ScriptedEngine(config) as bystander:
            for field, message in TOO_MUCH.items():
                await refused(field, message())
                await bystander.barrier()

            async def others_are_gone() -> bool:
                return [session.engine_id for session in (await status_of(stub)).sessions] == ["engine"]

            await until(others_are_gone)
            assert (await status_of(stub)).num_prompts == 0
        assert all(line.isprintable() and len(line) < 5000 for line in (tmp_path / "log").read_text().splitlines())

    run(scenario)


# Places and tokens that no one wanted


async def advise(config: DaemonConfig) -> str:
    """Return what `kvtier advise` prints."""
    code = "from kvtier.cli.app import main; main()"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, f"--socket={config.server.socket}", "advise"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output
    return output.decode()


def test_places_and_tokens_that_no_one_wanted_are_bounded_and_printed_harmless(tmp_path: Path) -> None:
    config = config_in(tmp_path)

    def place(number: int) -> pb.ChangingMiddle:
        text = (HOSTILE * 100).encode()[: limits.PLACE_EXAMPLE.max_bytes - 4].decode(errors="ignore")
        return pb.ChangingMiddle(
            digest=chunk_key(number)[:16],
            num_stable_tokens=number,
            num_tokens=2 * number,
            num_prompts=1 + number % 60_000,
            before=text * 4,
            examples=[text, "", "\n\n"],
        )

    async def scenario() -> None:
        async with serving(config, tmp_path / "log") as (pid, stub), ScriptedEngine(config) as engine:
            await until(lambda: counts_are_loaded(stub))
            await flood(engine, range(3))
            before = held(pid, config.host.arena_dir).private_bytes
            for number in range(5000):
                await engine.send(changing_middle=place(number))
            for number in range(50):
                tokens = pb.PrefixTokens(digest=chunk_key(number)[:16], tokens=range(limits.MAX_TOKENS // 4))
                await engine.send(prefix_tokens=tokens)
            await engine.all_done()
            assert grown(held(pid, config.host.arena_dir).private_bytes - before) < 32 * MIB
            (namespace,) = (await stub.GetAdvice(cache_pb2.GetAdviceRequest())).namespaces
            assert [place.num_stable_tokens for place in namespace.places] == list(range(4999, 4935, -1))
            assert (await status_of(stub)).num_prompts == 0
            printed = await advise(config)
            assert "evil" in printed
            assert not [line for line in printed.splitlines() if not line.isprintable() or len(line) > 80]
            assert not [line for line in printed.splitlines() if line.lstrip().startswith("INJECTED")]
        log = (tmp_path / "log").read_text()
        assert 0 < log.count("changing_place_found") < 20, "at most one line in ten seconds"
        assert (config.disk.disk_dir / FOLDER_NAME).is_dir()

    run(scenario)


# After that


def test_counts_that_are_damaged_meanwhile_cost_the_counts_alone(tmp_path: Path) -> None:
    """The daemon starts, keeps every pin, takes engines, and finds prompts again."""
    config = config_in(tmp_path)
    digest = chunk_key("system")[:16]

    def requests(first: int) -> pb.RequestsSeen:
        prefixes = [pb.SeenPrefix(digest=digest, num_tokens=64, is_system_prompt=True)]
        seen = [pb.SeenRequest(prefixes=prefixes, prompt_digest=first + n, num_tokens=80) for n in range(8)]
        return pb.RequestsSeen(requests=seen)

    async def found(stub: Stub, engine: ScriptedEngine) -> None:
        await until(lambda: counts_are_loaded(stub))
        await engine.send(requests_seen=requests(0))
        while list((await engine.receive("prefixes_wanted")).prefixes_wanted.digests) != [digest]:
            pass

    damages: list[Callable[[Path, Path], Any]] = [
        lambda sketch, uses: (sketch.write_bytes(sketch.read_bytes()[:-9]), uses.write_bytes(b"\xff" * 100)),
        lambda sketch, uses: (sketch.write_bytes(b"KVTSKTCH" + b"\xff" * 10_000), uses.write_text('{"uses": 5}')),
        _lengthen_both,
    ]

    async def scenario() -> None:
        async with serving(config, tmp_path / "log") as (_, stub), ScriptedEngine(config) as engine:
            await found(stub, engine)
            await stub.Pin(cache_pb2.PinRequest(name="kept", tokens=range(80)))
        for number, damage in enumerate(damages):
            (sketch,) = (config.disk.disk_dir / FOLDER_NAME).glob("*.sketch")
            damage(sketch, sketch.with_suffix(".json"))
            log = tmp_path / f"log-{number}"
            async with serving(config, log) as (pid, stub), ScriptedEngine(config) as engine:
                await found(stub, engine)
                assert held(pid, config.host.arena_dir).private_bytes < 256 * MIB
                prompts = (await stub.ListPrompts(cache_pb2.ListPromptsRequest())).prompts
                assert [prompt.name for prompt in prompts] == ["kept"]
                await assert_clean_online(stub)
            assert log.read_text().count("saved_traffic_unreadable") == 2
            assert "Traceback" not in log.read_text()

    run(scenario)


def _lengthen_both(sketch: Path, uses: Path) -> None:
    for path in (sketch, uses):
        with path.open("r+b") as file:
            file.truncate(2**40)
