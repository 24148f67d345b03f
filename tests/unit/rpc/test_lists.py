"""Lists come in pages without what may be long, so that no list is too long for a message.

Recipes of more than 64 MiB together made `list`, `warm` and `status` fail, and `doctor` said that no daemon answers;
fingerprints did the same to `status`.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from kvtier._pb import cache_pb2
from kvtier.client.admin import AdminClient
from kvtier.core.fingerprint import namespace_id
from kvtier.ledger import Ledger, NamespaceRow
from kvtier.rpc.list_pages import MAX_PAGE_SIZE, PAGE_BYTES, fill_page, page_size
from tests.fakes.operator import Stub, pin
from tests.fakes.scripted_engine import ONE_GROUP, config_in, running

MIB = 1 << 20
NUM_LONG = 70
LONGEST_MESSAGE = 64 * MIB


async def listed(stub: Stub, size: int) -> list[list[str]]:
    """Return the names on each page."""
    pages, token = list[list[str]](), ""
    while True:
        page = await stub.ListPrompts(cache_pb2.ListPromptsRequest(page_size=size, page_token=token))
        pages.append([status.name for status in page.prompts])
        token = page.next_page_token
        if not token:
            return pages


def test_recipes_of_any_length_are_no_part_of_lists(tmp_path: Path) -> None:
    config = config_in(tmp_path)

    def looked() -> None:
        with AdminClient(config.server.socket) as client:
            prompts = client.list()
            assert [status.name for status in prompts] == [f"p{number:02}" for number in range(NUM_LONG)]
            assert not any(status.recipe_json for status in prompts)
            assert len(client.get("p00").recipe_json) == MIB
            assert client.status().prompt_bytes >= NUM_LONG * MIB

    async def scenario() -> None:
        async with running(config) as stub:
            for number in range(NUM_LONG):
                await pin(stub, f"p{number:02}", recipe_json="x" * MIB)
            await asyncio.to_thread(looked)

    asyncio.run(scenario())


def test_fingerprints_of_any_length_are_no_part_of_the_status(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    (tmp_path / "disk").chmod(0o700)
    ledger = Ledger.open(tmp_path / "disk" / "ledger.sqlite")
    fingerprints = [{"number": str(number), "config": "x" * MIB} for number in range(NUM_LONG)]
    for fingerprint in fingerprints:
        row = NamespaceRow(
            namespace_id=namespace_id(fingerprint),
            model="m",
            fingerprint=fingerprint,
            layout=ONE_GROUP,
            created_unix_s=1e10,
            seen_unix_s=1e10,
        )
        ledger.put_namespace(row)
    ledger.close()

    def looked() -> None:
        with AdminClient(config.server.socket) as client:
            status = client.status()
            assert len(status.namespaces) == NUM_LONG
            assert not any(namespace.fingerprint for namespace in status.namespaces)
            named = client.namespaces()
            assert [each.namespace_id for each in named] == sorted(map(namespace_id, fingerprints))
            assert {each.fingerprint["number"] for each in named} == {each["number"] for each in fingerprints}

    async def scenario() -> None:
        async with running(config):
            await asyncio.to_thread(looked)

    asyncio.run(scenario())


def test_pages_name_each_prompt_once_in_order(tmp_path: Path) -> None:
    names = ["a", "a.b", "a0", "b", "b/c"]

    async def scenario() -> None:
        async with running(config_in(tmp_path)) as stub:
            for name in reversed(names):
                await pin(stub, name)
            assert await listed(stub, 0) == [names]
            assert await listed(stub, 2) == [names[:2], names[2:4], names[4:]]
            assert await listed(stub, 5) == [names]

    asyncio.run(scenario())


def test_what_comes_and_goes_between_two_pages_moves_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(config_in(tmp_path)) as stub:
            for name in "bdf":
                await pin(stub, name)
            first = await stub.ListPrompts(cache_pb2.ListPromptsRequest(page_size=2))
            await stub.Unpin(cache_pb2.UnpinRequest(name="d"))
            await stub.Evict(cache_pb2.EvictRequest(name="d"))  # the last one listed is no more
            for name in "ace":
                await pin(stub, name)
            rest = await stub.ListPrompts(cache_pb2.ListPromptsRequest(page_size=10, page_token=first.next_page_token))
            assert [status.name for status in first.prompts] == ["b", "d"]
            assert [status.name for status in rest.prompts] == ["e", "f"]

    asyncio.run(scenario())


def test_a_token_of_no_page_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(config_in(tmp_path)) as stub:
            with pytest.raises(grpc.aio.AioRpcError, match="page_token") as refused:
                await stub.ListPrompts(cache_pb2.ListPromptsRequest(page_token="\x1b[31m"))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(scenario())


async def statuses(models: list[str]) -> AsyncIterator[tuple[str, cache_pb2.PromptStatus]]:
    for number, model in enumerate(models):
        yield str(number), cache_pb2.PromptStatus(name=str(number), model=model)


def test_a_page_is_bounded_in_bytes() -> None:
    async def scenario() -> None:
        half = "x" * (PAGE_BYTES // 2 - 100)
        page, token = await fill_page(statuses([half] * 5), 1000)
        assert ([status.name for status in page], token) == (["0", "1"], "1")
        page, token = await fill_page(statuses(["x" * 2 * PAGE_BYTES, "y"]), 1000)
        assert ([status.name for status in page], token) == (["0"], "0"), "one longer than a page has one of its own"
        assert await fill_page(statuses([]), 1000) == ([], "")

    asyncio.run(scenario())


@pytest.mark.parametrize(("asked", "size"), [(0, MAX_PAGE_SIZE), (7, 7), (10**6, MAX_PAGE_SIZE)])
def test_a_page_is_as_long_as_asked_up_to_a_limit(asked: int, size: int) -> None:
    assert page_size(asked) == size
