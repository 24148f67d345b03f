"""Prompts that many requests begin with: found, pinned within a budget, kept over a start, and ended again."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from kvtier.config import DaemonConfig
from kvtier.discovery import auto_pins
from kvtier.discovery.selection import MAX_WANTED
from tests.fakes.operator import Stub, apply, make_durable, pin, prompt_of, status_of, unpin, until
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running, wait_durable
from tests.unit.bundles.test_round_trip import bundle_of, export, import_, refused

SYSTEM_TOKENS = 64
BUDGET = 1 << 20


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_pins, "SLOW_POLL_S", 0.02)


def auto_config(folder: Path, *, disk_bytes: int = 1 << 30, **cache: object) -> DaemonConfig:
    config = config_in(folder, disk_bytes=disk_bytes)
    usual: dict[str, object] = {"auto_pin_max_bytes": BUDGET, "auto_pin_min_tokens": 32}
    return replace(config, cache=replace(config.cache, **usual | cache))  # type: ignore[arg-type]


def digest_of(name: str, num_tokens: int) -> bytes:
    return chunk_key((name, num_tokens))[:16]


def tokens_of(name: str, num_tokens: int = SYSTEM_TOKENS) -> list[int]:
    first = int.from_bytes(name.encode()[:3].ljust(3), "big")
    return list(range(first, first + num_tokens))


def request(system: str, question: object, num_tokens: int = SYSTEM_TOKENS) -> pb.SeenRequest:
    """A request with a system prompt, as an engine reports it."""
    prefixes = [pb.SeenPrefix(digest=digest_of(system, num_tokens), num_tokens=num_tokens, is_system_prompt=True)]
    return pb.SeenRequest(prefixes=prefixes, prompt_digest=hash((system, question)) % 2**64, num_tokens=num_tokens + 20)


async def ask(engine: ScriptedEngine, system: str, num_requests: int, first: int = 0) -> None:
    requests = [request(system, question) for question in range(first, first + num_requests)]
    await engine.send(requests_seen=pb.RequestsSeen(requests=requests))


async def send_tokens(engine: ScriptedEngine, system: str, **fields: str) -> None:
    """Send the tokens of a prefix as soon as they are wanted."""
    wanted: Sequence[bytes] = ()
    while digest_of(system, SYSTEM_TOKENS) not in wanted:
        wanted = (await engine.receive("prefixes_wanted")).prefixes_wanted.digests
    await engine.send(
        prefix_tokens=pb.PrefixTokens(digest=digest_of(system, SYSTEM_TOKENS), tokens=tokens_of(system), **fields)
    )


async def found(engine: ScriptedEngine, system: str, num_requests: int = 4) -> pb.Pin:
    """Ask so often that the prompt is found; return the pin as the engine gets it."""
    await ask(engine, system, num_requests)
    await send_tokens(engine, system)
    return (await engine.receive("pin_added")).pin_added.pin


async def names(stub: Stub) -> set[str]:
    listed = await stub.ListPrompts(cache_pb2.ListPromptsRequest())
    return {prompt.name for prompt in listed.prompts}


@asynccontextmanager
async def attached(config: DaemonConfig) -> AsyncIterator[tuple[Stub, ScriptedEngine]]:
    async with running(config) as stub, ScriptedEngine(config) as engine:
        if config.cache.auto_pin != "off":
            await until(lambda: counts_are_loaded(stub))
        yield stub, engine


async def counts_are_loaded(stub: Stub, num_namespaces: int = 1) -> bool:
    return len((await stub.GetAdvice(cache_pb2.GetAdviceRequest())).namespaces) == num_namespaces


def test_a_prompt_that_repeats_is_pinned_and_survives_a_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = auto_config(tmp_path)
        async with attached(config) as (stub, engine):
            assert engine.welcome.report_requests
            bound = await found(engine, "support")
            assert (list(bound.tokens), bound.model, bound.pinned) == (tokens_of("support"), "model", True)
            keys = [chunk_key(("support", n)) for n in range(SYSTEM_TOKENS // 16)]
            await engine.bind(bound.pin_id, keys)
            await engine.store(keys)
            await wait_durable(stub, bound.name)
            prompt = await prompt_of(stub, bound.name)
            assert prompt.expires_unix_s == pytest.approx(time.time() + config.cache.auto_pin_ttl_s, abs=60)
        async with running(config) as stub:
            assert await names(stub) == {bound.name}
            async with ScriptedEngine(config) as engine:
                await until(lambda: counts_are_loaded(stub))
                await ask(engine, "support", 10, first=100)
                await ask(engine, "other", 4)
                wanted = (await engine.receive("prefixes_wanted")).prefixes_wanted.digests
                assert list(wanted) == [digest_of("other", SYSTEM_TOKENS)], "it has its pin"

    asyncio.run(scenario())


def test_a_request_that_is_repeated_is_no_system_prompt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with attached(auto_config(tmp_path)) as (_, engine):
            await engine.send(requests_seen=pb.RequestsSeen(requests=[request("cron", 1)] * 50))
            await ask(engine, "rare", 2)
            await ask(engine, "short", 0)
            await ask(engine, "good", 4)
            wanted = (await engine.receive("prefixes_wanted")).prefixes_wanted.digests
            assert list(wanted) == [digest_of("good", SYSTEM_TOKENS)]

    asyncio.run(scenario())


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_nothing_is_pinned_when_it_is_only_observed_or_off(tmp_path: Path, mode: str) -> None:
    async def scenario() -> None:
        async with attached(auto_config(tmp_path, auto_pin=mode)) as (stub, engine):
            assert engine.welcome.report_requests == (mode == "observe")
            await ask(engine, "support", 50)
            await engine.send(
                prefix_tokens=pb.PrefixTokens(digest=digest_of("support", SYSTEM_TOKENS), tokens=tokens_of("support"))
            )
            await engine.send(ping=pb.Ping(id=1))
            await engine.receive("pong")
            assert not await names(stub)
            assert (await status_of(stub)).counters["requests_observed"] == (50 if mode == "observe" else 0)

    asyncio.run(scenario())


def test_tokens_that_were_not_asked_for_are_not_pinned(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with attached(auto_config(tmp_path)) as (stub, engine):
            await ask(engine, "support", 4)
            await engine.receive("prefixes_wanted")
            digest = digest_of("support", SYSTEM_TOKENS)
            await engine.send(prefix_tokens=pb.PrefixTokens(digest=digest, tokens=tokens_of("support")[:-1]))
            await engine.send(prefix_tokens=pb.PrefixTokens(digest=digest_of("x", 1), tokens=tokens_of("x")))
            await engine.send(ping=pb.Ping(id=1))
            await engine.receive("pong")
            assert not await names(stub)

    asyncio.run(scenario())


def test_what_a_pin_with_a_name_begins_with_needs_no_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with attached(auto_config(tmp_path)) as (stub, engine):
            request = cache_pb2.PinRequest(name="policy", tokens=tokens_of("support", 200))
            await stub.Pin(request)
            await ask(engine, "support", 4)
            await send_tokens(engine, "support")
            await ask(engine, "other", 4)
            await send_tokens(engine, "other")

            async def both() -> bool:
                return len(await names(stub)) == 2

            await until(both)
            assert {name.partition("-")[0] for name in await names(stub)} == {"policy", "auto"}
            await unpin(stub, "policy")
            await ask(engine, "support", 1, first=77)
            await send_tokens(engine, "support")

            async def again() -> bool:
                return len(await names(stub)) == 3

            await until(again)

    asyncio.run(scenario())


def test_better_prompts_displace_those_that_are_used_less(tmp_path: Path) -> None:
    async def scenario() -> None:
        budget = 6000 * SYSTEM_TOKENS // 16  # one prompt
        async with attached(auto_config(tmp_path, auto_pin_max_bytes=budget)) as (stub, engine):
            first = await found(engine, "first", 4)
            await ask(engine, "second", 40)
            await send_tokens(engine, "second")

            async def displaced() -> bool:
                return first.name not in await names(stub) and len(await names(stub)) == 1

            await until(displaced)
            assert (await status_of(stub)).counters["auto_pins_ended"] == 1

    asyncio.run(scenario())


def test_automatic_pins_end_for_a_pin_with_a_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with attached(auto_config(tmp_path, disk_bytes=1 << 20)) as (stub, engine):
            old = await found(engine, "support")
            pages = (1 << 20) // 6000
            await pin(stub, "long", tokens=16 * (pages - 1))
            assert await names(stub) == {"long"}, f"{old.name} has ended for it"

    asyncio.run(scenario())


def test_a_dry_run_counts_on_what_automatic_pins_would_leave(tmp_path: Path) -> None:
    """It was refused what an apply without it did."""

    async def scenario() -> None:
        async with attached(auto_config(tmp_path, disk_bytes=13 * 6000)) as (stub, engine):
            automatic = {await stored(stub, engine, "old"), (await found(engine, "new")).name}
            long = cache_pb2.PinRequest(name="long", tokens=range(5000, 5000 + 16 * 13))
            await apply(stub, long, dry_run=True)
            assert await names(stub) == automatic
            too_long = cache_pb2.PinRequest(name="long", tokens=range(5000, 5000 + 16 * 14))
            with pytest.raises(grpc.aio.AioRpcError, match="needs about"):
                await apply(stub, too_long, dry_run=True)
            await apply(stub, long)
            assert await names(stub) == {"long"}

    asyncio.run(scenario())


def test_automatic_pins_end_for_a_pin_that_a_request_asks_for(tmp_path: Path) -> None:
    """Requests were refused to keep pins that no one had asked for."""

    async def scenario() -> None:
        async with attached(auto_config(tmp_path, disk_bytes=26 * 6000)) as (stub, engine):
            await pin(stub, "policy", tokens=16 * 20, first=5000)
            automatic = (await found(engine, "support")).name
            assert await names(stub) == {"policy", automatic}
            asked = pb.RequestPins(
                id=1,
                prefixes=[pb.RequestedPrefix(digest=b"d" * 16, num_tokens=64, ttl_s=300)],
                tokens=range(64),
                name="mine",
            )
            await engine.send(request_pins=asked)
            (result,) = (await engine.receive("request_pins_answer")).request_pins_answer.results
            assert result.state == pb.RequestPinResult.PINNED
            assert await names(stub) == {"policy", "mine"}

    asyncio.run(scenario())


def test_prefixes_that_come_no_more_keep_no_other_from_being_asked_for(tmp_path: Path) -> None:
    """Engines were asked for 64 that were worth more, for hours, though the third request was the last of each."""

    async def scenario() -> None:
        async with attached(auto_config(tmp_path, auto_pin_max_bytes=1 << 29)) as (_, engine):
            past = [request(f"d{number}", question, 1600) for number in range(MAX_WANTED) for question in range(3)]
            await engine.send(requests_seen=pb.RequestsSeen(requests=past))
            await ask(engine, "live", 3)
            await send_tokens(engine, "live")

    asyncio.run(scenario())


async def stored(stub: Stub, engine: ScriptedEngine, system: str) -> str:
    """Let a prompt be found, and make it durable; return its pin's name."""
    bound = await found(engine, system)
    keys = [chunk_key((system, n)) for n in range(SYSTEM_TOKENS // 16)]
    await engine.bind(bound.pin_id, keys)
    await engine.store(keys)
    await wait_durable(stub, bound.name)
    return str(bound.name)


@pytest.mark.parametrize(("num_chunks", "num_left"), [(7, 1), (9, 1), (10, 0), (13, 0)])
def test_as_many_automatic_pins_end_as_a_pin_with_a_name_needs(tmp_path: Path, num_chunks: int, num_left: int) -> None:
    async def scenario() -> None:
        disk_bytes = 13 * 6000  # thirteen chunks, of which each automatic pin has four
        async with attached(auto_config(tmp_path, disk_bytes=disk_bytes)) as (stub, engine):
            old, new = await stored(stub, engine, "old"), await stored(stub, engine, "new")
            with pytest.raises(grpc.aio.AioRpcError, match="needs about"):
                await pin(stub, "too-long", tokens=16 * 14)
            assert await names(stub) == {old, new}, "none ends in vain"
            await pin(stub, "long", tokens=16 * num_chunks)
            assert await names(stub) == {"long", *[old, new][2 - num_left :]}

    asyncio.run(scenario())


def test_automatic_pins_free_what_they_take_compressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted uncompressed, one that ended was thought to be enough, and the pin with a name was refused."""

    async def scenario() -> None:
        async with attached(auto_config(tmp_path, disk_bytes=10 * 6000)) as (stub, engine):
            monkeypatch.setattr(engine, "payload", lambda key: bytes(6000))
            await stored(stub, engine, "old")
            await stored(stub, engine, "new")
            await pin(stub, "long", tokens=16 * 10)
            assert await names(stub) == {"long"}

    asyncio.run(scenario())


def test_a_pin_that_is_on_disk_already_needs_no_more_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned again with another TTL, it was counted uncompressed: automatic pins ended for it, and it was refused."""

    async def scenario() -> None:
        async with attached(auto_config(tmp_path, disk_bytes=12 * 6000)) as (stub, engine):
            monkeypatch.setattr(engine, "payload", lambda key: bytes(6000))
            await make_durable(stub, engine, [chunk_key(("long", n)) for n in range(5)], "long")
            automatic = await stored(stub, engine, "support")
            await pin(stub, "to-come", tokens=16 * 11, first=5000)
            await pin(stub, "long", ttl_s=3600)
            assert await names(stub) == {"long", automatic, "to-come"}
            assert (await prompt_of(stub, "long")).expires_unix_s

    asyncio.run(scenario())


def test_pins_of_another_namespace_end_for_none_in_vain(tmp_path: Path) -> None:
    """The oldest ones ended, wherever they were: it was of no use where the space was short."""

    async def scenario() -> None:
        config = auto_config(tmp_path, disk_bytes=13 * 6000)
        async with attached(config) as (stub, engine):
            other = await stored(stub, engine, "other")
        async with (
            running(config) as stub,
            ScriptedEngine(config, fingerprint={"weights": "2"}, model_names=["b"]) as engine,
        ):
            await until(lambda: counts_are_loaded(stub, 2))
            own = await found(engine, "own")
            await pin(stub, "long", tokens=16 * 10, model="b")
            assert await names(stub) == {other, "long"}, f"{own.name} has ended"

    asyncio.run(scenario())


@pytest.mark.parametrize("disk_bytes", [37_000, 58_000])
def test_automatic_pins_end_for_an_import(tmp_path: Path, disk_bytes: int) -> None:
    """They made the daemon refuse it: by what is promised, or by what the packs of both take."""

    async def scenario() -> None:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
        data = await bundle_of(config_in(tmp_path / "a"))
        config = auto_config(tmp_path / "b", disk_bytes=disk_bytes)
        async with attached(config) as (stub, engine):
            await stored(stub, engine, "old")
            assert (await import_(stub, data)).origin == "named"
            assert await names(stub) == {"p"}

    asyncio.run(scenario())


def test_a_pin_that_no_request_uses_ends_and_is_forgotten(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = auto_config(tmp_path, auto_pin_ttl="1s")
        async with attached(config) as (stub, engine):
            await found(engine, "support")

            async def gone() -> bool:
                return not await names(stub)

            await until(gone)

    asyncio.run(scenario())


def test_an_automatic_pin_is_adopted_under_a_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with attached(auto_config(tmp_path)) as (stub, engine):
            found_pin = await found(engine, "support")
            request = cache_pb2.PinRequest(name="support", adopt=found_pin.name, ttl_s=3600, priority=7)
            status = await stub.Pin(request)
            assert (status.name, status.origin, status.num_tokens, status.priority) == ("support", "named", 64, 7)
            assert await names(stub) == {"support"}
            for adopted, code in (("support", grpc.StatusCode.INVALID_ARGUMENT), ("x", grpc.StatusCode.NOT_FOUND)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Pin(cache_pb2.PinRequest(name="again", adopt=adopted))
                assert caught.value.code() == code
            with pytest.raises(grpc.aio.AioRpcError, match="comes from the prompt that is named"):
                await stub.Pin(cache_pb2.PinRequest(name="again", adopt="x", tokens=[1]))
            with pytest.raises(grpc.aio.AioRpcError, match="those of automatic pins; choose another"):
                await stub.Pin(cache_pb2.PinRequest(name="auto-mine", tokens=[1]))

    asyncio.run(scenario())


def test_an_adopted_pin_keeps_its_chunks_and_needs_no_space(tmp_path: Path) -> None:
    """A new pin beside the old one was counted twice, and its chunks were evictable until an engine had bound it."""

    async def scenario() -> None:
        config = auto_config(tmp_path, disk_bytes=40_000, auto_pin_public=True)
        async with attached(config) as (stub, engine):
            bound = await found(engine, "support")
            keys = [chunk_key(("support", n)) for n in range(SYSTEM_TOKENS // 16)]
            await engine.bind(bound.pin_id, keys)
            await engine.store(keys)
            await wait_durable(stub, bound.name)
        async with running(config) as stub:  # no engine would bind it again
            status = await stub.Pin(cache_pb2.PinRequest(name="support", adopt=bound.name, priority=3))
            assert (status.pin_id, status.state) == (bound.pin_id, cache_pb2.PromptStatus.DURABLE)
            assert not status.public, "as was asked for"
            assert not (await stub.Evict(cache_pb2.EvictRequest(all=True))).num_chunks
        async with running(config) as stub:
            assert (await prompt_of(stub, "support")).state == cache_pb2.PromptStatus.DURABLE
            assert await names(stub) == {"support"}

    asyncio.run(scenario())


def test_the_name_of_an_adopted_pin_is_none_of_automatic_pins(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with attached(auto_config(tmp_path)) as (stub, engine):
            name = (await found(engine, "support")).name
            for taken in (name, "auto-other"):
                with pytest.raises(grpc.aio.AioRpcError, match="those of automatic pins; choose another"):
                    await stub.Pin(cache_pb2.PinRequest(name=taken, adopt=name))
            assert await names(stub) == {name}
            await pin(stub, "support")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Pin(cache_pb2.PinRequest(name="support", adopt=name))
            assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
            await stub.Pin(cache_pb2.PinRequest(name="support", adopt=name, replace=True))
            assert await names(stub) == {"support"}
            assert (await prompt_of(stub, "support")).num_tokens == SYSTEM_TOKENS

    asyncio.run(scenario())


def test_a_prompt_that_has_the_name_already_takes_the_adopted_pins_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with attached(auto_config(tmp_path)) as (stub, engine):
            bound = await found(engine, "support")
            known = await stub.Pin(cache_pb2.PinRequest(name="mine", tokens=tokens_of("support"), model="model"))
            status = await stub.Pin(cache_pb2.PinRequest(name="mine", adopt=bound.name, priority=3))
            assert (status.pin_id, status.priority) == (known.pin_id, 3)
            assert await names(stub) == {"mine"}

    asyncio.run(scenario())


def test_a_bundle_of_an_automatic_pin_is_imported_under_a_name_of_its_own(tmp_path: Path) -> None:
    """Under that of an automatic pin it became one that no request, and then no operator, kept."""

    async def scenario() -> None:
        async with attached(auto_config(tmp_path)) as (stub, engine):
            bound = await found(engine, "support")
            keys = [chunk_key(("support", n)) for n in range(SYSTEM_TOKENS // 16)]
            await engine.bind(bound.pin_id, keys)
            await engine.store(keys)
            await wait_durable(stub, bound.name)
            data = await export(stub, bound.name)
            for fields in ({}, {"name": "auto-x"}):
                await refused(stub, data, grpc.StatusCode.INVALID_ARGUMENT, "those of automatic pins", **fields)
            assert (await prompt_of(stub, bound.name)).origin == "auto"
            assert (await import_(stub, data, name="support")).origin == "named"

    asyncio.run(scenario())


def test_automatic_pins_are_public_no_longer_when_they_are_not_to_be(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = auto_config(tmp_path, auto_pin_public=True)
        async with attached(config) as (stub, engine):
            automatic = (await found(engine, "support")).name
            await pin(stub, "named", public=True)
            assert (await prompt_of(stub, automatic)).public
        for _ in range(2):
            async with running(auto_config(tmp_path)) as stub:
                assert not (await prompt_of(stub, automatic)).public
                assert (await prompt_of(stub, "named")).public, "its operator said so"

    asyncio.run(scenario())


def test_what_a_pin_was_good_for_survives_a_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = auto_config(tmp_path)
        async with attached(config) as (stub, engine):
            name = (await found(engine, "support")).name
            await ask(engine, "support", 5, first=10)

            async def used() -> bool:
                return (await prompt_of(stub, name)).use.num_requests == 5

            await until(used)
        async with running(config) as stub:
            await until(lambda: _num_requests(stub, name, 5))
            assert (await prompt_of(stub, name)).use.saved_tokens == 5 * SYSTEM_TOKENS
            assert (await prompt_of(stub, name)).origin == "auto"

    asyncio.run(scenario())


async def _num_requests(stub: Stub, name: str, expected: int) -> bool:
    return (await prompt_of(stub, name)).use.num_requests == expected


def test_advice_names_what_is_worth_a_pin_and_why_the_rest_is_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with attached(auto_config(tmp_path, auto_pin="observe")) as (stub, engine):
            (namespace,) = (await stub.GetAdvice(cache_pb2.GetAdviceRequest())).namespaces
            assert not namespace.prefixes
            await ask(engine, "support", 8)
            await ask(engine, "rare", 2)
            await engine.send(requests_seen=pb.RequestsSeen(requests=[request("cron", 1)] * 9))
            place = pb.ChangingMiddle(
                num_stable_tokens=40, num_tokens=64, num_prompts=9, before="Today is", examples=["1"]
            )
            await engine.send(changing_middle=place)
            await engine.send(ping=pb.Ping(id=1))
            await engine.receive("pong")
            advice = await stub.GetAdvice(cache_pb2.GetAdviceRequest())
            (namespace,) = advice.namespaces
            verdicts = {each.digest: cache_pb2.AdvisedPrefix.Verdict.Name(each.verdict) for each in namespace.prefixes}
            expected = {"support": "CHOSEN", "rare": "TOO_FEW_REQUESTS", "cron": "ONE_PROMPT"}
            assert verdicts == {digest_of(name, SYSTEM_TOKENS): verdict for name, verdict in expected.items()}
            assert (advice.mode, advice.max_bytes) == ("observe", BUDGET)
            assert [(each.num_stable_tokens, each.before) for each in namespace.places] == [(40, "Today is")]
            assert namespace.prefixes[0].saved_share == pytest.approx(8 * 64 / (19 * 84))
            small = await stub.GetAdvice(cache_pb2.GetAdviceRequest(max_bytes=1))
            verdicts_of_small = {each.digest: each.verdict for each in small.namespaces[0].prefixes}
            assert verdicts_of_small[digest_of("support", SYSTEM_TOKENS)] == cache_pb2.AdvisedPrefix.OVER_BUDGET

    asyncio.run(scenario())


def test_advice_names_the_budget_that_other_pins_leave(tmp_path: Path) -> None:
    """It named the setting, and prefixes were over a budget of which most was free by what it said."""

    async def scenario() -> None:
        config = auto_config(tmp_path, disk_bytes=13 * 6000, auto_pin_max_bytes=13 * 6000, auto_pin="observe")
        async with attached(config) as (stub, engine):
            keys = [chunk_key(("policy", n)) for n in range(5)]
            await make_durable(stub, engine, keys, "policy")
            await ask(engine, "support", 8)
            await engine.barrier()
            advice = await stub.GetAdvice(cache_pb2.GetAdviceRequest())
            assert advice.max_bytes == pytest.approx(8 * 6000, abs=5 * 100)
            assert (await stub.GetAdvice(cache_pb2.GetAdviceRequest(max_bytes=77))).max_bytes == 77

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("message", "match"),
    [
        ({"requests_seen": pb.RequestsSeen(requests=[pb.SeenRequest()] * 1025)}, "requests_seen.requests"),
        (
            {"requests_seen": pb.RequestsSeen(requests=[pb.SeenRequest(prefixes=[pb.SeenPrefix()] * 8)])},
            "requests_seen.prefixes",
        ),
        (
            {"requests_seen": pb.RequestsSeen(requests=[pb.SeenRequest(prefixes=[pb.SeenPrefix(digest=b"x")])])},
            "requests_seen.digest",
        ),
        ({"prefix_tokens": pb.PrefixTokens(digest=b"x")}, "prefix_tokens.digest"),
        ({"prefix_tokens": pb.PrefixTokens(digest=bytes(16), lora_name="x" * 5000)}, "prefix_tokens.lora_name"),
        ({"changing_middle": pb.ChangingMiddle(num_tokens=1 << 21, num_prompts=1)}, "changing_middle.num_tokens"),
        ({"changing_middle": pb.ChangingMiddle(num_prompts=0)}, "changing_middle.num_prompts"),
        ({"changing_middle": pb.ChangingMiddle(num_prompts=1, examples=["x"] * 4)}, "changing_middle.examples"),
        ({"changing_middle": pb.ChangingMiddle(num_prompts=1, before="x" * 2000)}, "changing_middle.before"),
    ],
)
def test_messages_out_of_bounds_end_the_session_by_field(
    tmp_path: Path, message: dict[str, object], match: str
) -> None:
    async def scenario() -> None:
        async with attached(auto_config(tmp_path)) as (_, engine):
            await engine.send(**message)
            with pytest.raises((EOFError, grpc.aio.AioRpcError), match=match):
                await engine.receive("pong")

    asyncio.run(scenario())


def test_a_flood_of_single_prompts_pins_nothing_and_stays_within_bounds(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with attached(auto_config(tmp_path)) as (stub, engine):
            for batch in range(20):
                requests = [request(f"{batch}-{number}", 0) for number in range(1000)]
                await engine.send(requests_seen=pb.RequestsSeen(requests=requests, num_skipped=1))
            for number in range(200):
                place = pb.ChangingMiddle(num_stable_tokens=number, num_tokens=500, num_prompts=9)
                await engine.send(changing_middle=place)
            await engine.send(ping=pb.Ping(id=1))
            await engine.receive("pong")
            (namespace,) = (await stub.GetAdvice(cache_pb2.GetAdviceRequest())).namespaces
            assert not namespace.prefixes
            assert len(namespace.places) == 64
            counters = (await status_of(stub)).counters
            assert (counters["requests_observed"], counters["requests_skipped"]) == (20_000, 20)
            assert not await names(stub)

    asyncio.run(scenario())
