"""A pin's priority: kept, reported, and obeyed where pinned prompts come back; and a prompt's tokens."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvtier._pb import cache_pb2
from kvtier.prompts.book import PromptBook
from tests.fakes.operator import Stub, pin, prompt_of, status_of, unpin, until
from tests.fakes.rows import binding_row, prompt_row
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, host_bytes_for, running, wait_durable

Status = grpc.StatusCode


async def refused(call: object, code: Status, match: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=match) as caught:
        await call  # type: ignore[misc]
    assert caught.value.code() == code


def test_a_priority_is_kept_over_a_start_and_changed_by_pinning_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            pin_id = await pin(stub, priority=9)
            await refused(pin(stub, priority=101), Status.INVALID_ARGUMENT, "priority = 101: use -100 to 100")
        async with running(config) as stub:
            assert (await prompt_of(stub)).priority == 9
            assert await pin(stub, priority=-100) == pin_id, "still the same prompt"
            assert (await prompt_of(stub)).priority == -100
            await unpin(stub)
            assert (await prompt_of(stub)).priority == 0, "it was the pin's, not the prompt's"

    asyncio.run(scenario())


def test_engines_are_notified_of_priorities(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            await pin(stub, priority=5)
            async with ScriptedEngine(config) as engine:
                assert [pin.priority for pin in engine.welcome.pins] == [5]
                await pin(stub, priority=6)
                assert (await engine.receive("pin_added")).pin_added.pin.priority == 6

    asyncio.run(scenario())


def test_the_order_is_by_priority_and_then_the_newest_first() -> None:
    book = PromptBook()
    for number, (priority, created_unix_s) in enumerate([(0, 1.0), (0, 2.0), (5, 0.0), (-1, 9.0)]):
        row = replace(prompt_row(f"p{number}", f"pin-{number}"), priority=priority, created_unix_s=created_unix_s)
        book.put(row)
        book.bind(binding_row(row.pin_id, numbers=[number]))
    expected = [binding_row(numbers=[number]).keys[0] for number in (2, 1, 0, 3)]
    assert [key for row in book.pinned_bindings("ns") for key in row.keys] == expected


async def _store(
    stub: Stub, engine: ScriptedEngine, name: str, keys: Sequence[bytes], first: int, priority: int
) -> None:
    await engine.bind(await pin(stub, name, first=first, priority=priority), keys)
    await engine.store(keys)
    await wait_durable(stub, name)


def test_the_most_important_prompt_comes_back_to_memory_before_newer_ones(tmp_path: Path) -> None:
    async def scenario() -> None:
        important, newer = ([chunk_key((name, n)) for n in range(4)] for name in ("important", "newer"))
        large = config_in(tmp_path)
        async with running(large) as stub, ScriptedEngine(large) as engine:
            await _store(stub, engine, "important", important, 0, 1)
            await _store(stub, engine, "newer", newer, 900, 0)
        small = config_in(tmp_path, host_bytes=host_bytes_for(5))
        async with running(replace(small, host=replace(small.host, prefetch=True))) as stub:

            async def all_there() -> bool:
                return (await prompt_of(stub, "important")).bindings[0].num_host_chunks == 4

            await until(all_there)
            assert (await status_of(stub)).host.num_chunks < 8

    asyncio.run(scenario())


def test_the_tokens_of_a_prompt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(config_in(tmp_path)) as stub:
            await pin(stub, tokens=100_000)
            reply = await stub.GetTokens(cache_pb2.GetTokensRequest(name="p"))
            assert list(reply.tokens) == list(range(100_000))
            await refused(stub.GetTokens(cache_pb2.GetTokensRequest(name="q")), Status.NOT_FOUND, "no prompt named 'q'")
            await stub.Pin(cache_pb2.PinRequest(name="later", recipe_json="{}"))
            request = cache_pb2.GetTokensRequest(name="later")
            await refused(stub.GetTokens(request), Status.FAILED_PRECONDITION, "run `kvtier pin later` while vLLM runs")

    asyncio.run(scenario())
