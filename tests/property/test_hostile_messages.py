"""Whatever an operator, an engine or a bundle says: it is refused by field, or recorded, listed and there later.

A bundle whose salt was a number was recorded before it was converted: every list and every attach failed from then on,
and the next start refused the ledger. 25 of 57 made-up headers ended as UNKNOWN or INTERNAL.
"""

import asyncio
import copy
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from kvtier.config import DaemonConfig
from kvtier.core.layout import KVLayout
from tests.fakes.bundles import LAYOUT, bundle_bytes, old_bundle, opened, opened_old, sealed, sealed_old
from tests.fakes.fsck import assert_clean
from tests.fakes.operator import Stub, status_of
from tests.fakes.scripted_engine import ONE_GROUP, ScriptedEngine, config_in, hello_message, running

Status = grpc.StatusCode
REFUSALS = (Status.INVALID_ARGUMENT, Status.FAILED_PRECONDITION, Status.ALREADY_EXISTS, Status.RESOURCE_EXHAUSTED)
SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])

texts = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["\ud800", "\0", "x" * 5000, "ö" * 3000, "\x1b[31m", "{}", "[/red]", "9" * 5000, "NaN"]),
)
numbers = st.one_of(
    st.integers(-2, 20), st.sampled_from([2**31, 2**32, 2**48, 2**63, 2**64 - 1, 2**64, -(2**63), 10**400])
)
scalars = st.one_of(st.none(), st.booleans(), numbers, st.floats(), texts)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)


class Daemon:
    """One folder, and what was recorded in it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvtier-test-"))
        self.config: DaemonConfig = config_in(self.folder)
        self.names: set[str] = set()

    async def check(self, stub: Stub) -> None:
        """Everything that was taken in is there, and nothing else."""
        listed = (await stub.ListPrompts(cache_pb2.ListPromptsRequest())).prompts
        assert {prompt.name for prompt in listed} == self.names
        assert (await status_of(stub)).num_prompts == len(self.names)

    async def refused(self, call: Any) -> bool:
        """Await a call; say whether it was refused, as a call may be."""
        (outcome,) = await asyncio.gather(_awaited(call), return_exceptions=True)
        if not isinstance(outcome, BaseException):
            return False
        assert isinstance(outcome, grpc.aio.AioRpcError), outcome
        assert outcome.code() in REFUSALS, outcome
        assert 0 < len(outcome.details() or "") <= 2000, outcome
        return True


async def _awaited(call: Any) -> object:
    return await call


def run(scenario: Coroutine[Any, Any, None], daemon: Daemon) -> None:
    try:
        asyncio.run(scenario)
        assert_clean(daemon.config.disk.disk_dir)
    finally:
        shutil.rmtree(daemon.folder)


# Bundles

Edit = tuple[int, str, Any]
edits = st.tuples(st.integers(0, 10**6), st.sampled_from(["replace", "drop", "add", "rename"]), values)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return each place in a JSON document, as what has it and its key there."""
    if not isinstance(value, dict | list):
        return []
    inside = list(value.items() if isinstance(value, dict) else enumerate(value))
    return [place for key, child in inside for place in [(value, key), *places(child)]]


def edited(header: dict[str, Any], edit: Edit) -> dict[str, Any]:
    """Return a header with one thing that is not as it was."""
    where, how, what = edit
    header = copy.deepcopy(header)
    all_places = places(header)
    parent, key = all_places[where % len(all_places)]
    if how == "replace":
        parent[key] = what
    elif how == "drop":
        del parent[key]
    elif how == "add" and isinstance(parent, dict):
        parent[str(what)[:20]] = what
    elif isinstance(parent, dict):
        parent[str(what)[:20]] = parent.pop(key)
    else:
        parent.append(what)
    return header


def pieces_of(data: bytes, name: str) -> list[cache_pb2.ImportMessage]:
    start = cache_pb2.ImportMessage(start=cache_pb2.ImportStart(name=name, replace=True))
    return [start, *(_piece(data[at : at + 2**20]) for at in range(0, len(data), 2**20))]


def _piece(data: bytes) -> cache_pb2.ImportMessage:
    return cache_pb2.ImportMessage(piece=cache_pb2.BundlePiece(data=data))


def salted_with_a_number() -> Edit:
    """The header of the attack."""
    header, _ = opened_old(old_bundle(2))
    return [key for _, key in places(header)].index("cache_salt"), "replace", 7


def check_edits(whole: bytes, layout: KVLayout, all_edits: list[Edit], name: str) -> None:
    """Import a bundle whole, and then with each edit of its header; all of them in one daemon."""
    is_old = b'"kvtier.bundle":"3"' not in whole
    header, data = (opened_old if is_old else opened)(whole)
    seal = sealed_old if is_old else sealed
    daemon = Daemon()

    async def scenario() -> None:
        async with running(daemon.config) as stub, ScriptedEngine(daemon.config, layout):
            assert not await daemon.refused(stub.Import(iter(pieces_of(seal(header, data), "whole"))))
            daemon.names.add("whole")
            for edit in all_edits:
                changed = edited(header, edit)
                if not await daemon.refused(stub.Import(iter(pieces_of(seal(changed, data), name)))):
                    metadata = changed["__metadata__"]
                    daemon.names.add(
                        name or (metadata["kvtier.prompt"]["name"] if is_old else metadata["kvtier.prompt.name"])
                    )
            await daemon.check(stub)
        async with running(daemon.config) as stub, ScriptedEngine(daemon.config, layout) as engine:
            await daemon.check(stub)
            assert {each.name for each in engine.welcome.pins} <= daemon.names
            for each in daemon.names:
                exported = [piece.data async for piece in stub.Export(cache_pb2.ExportRequest(name=each))]
                assert b"".join(exported)

    run(scenario(), daemon)


@SETTINGS
@given(all_edits=st.lists(edits, min_size=1, max_size=12), name=st.sampled_from(["p", ""]))
def test_any_header_is_refused_or_taken_in_for_good(all_edits: list[Edit], name: str) -> None:
    check_edits(bundle_bytes(), LAYOUT, all_edits, name)


@SETTINGS
@example(all_edits=[salted_with_a_number()], name="p")
@given(all_edits=st.lists(edits, min_size=1, max_size=12), name=st.sampled_from(["p", ""]))
def test_any_old_header_is_refused_or_taken_in_for_good(all_edits: list[Edit], name: str) -> None:
    check_edits(old_bundle(2), ONE_GROUP, all_edits, name)


# Pins

pins = st.fixed_dictionaries(
    {},
    optional={
        "name": st.one_of(st.sampled_from(["p", "q", "a/b"]), st.text(max_size=5)),
        "tokens": st.lists(st.integers(0, 2**32 - 1), max_size=5),
        "model": st.text(max_size=5) | st.just("x" * 5000),
        "lora_name": st.text(max_size=3),
        "lora_path": st.text(max_size=3) | st.just("\0"),
        "cache_salt": st.text(max_size=5) | st.just("\0") | st.just("\x1b]0;x\x07"),
        "recipe_json": st.text(max_size=5) | st.just("{" * 2000),
        "ttl_s": st.integers(0, 2**64 - 1) | st.just(3600),
        "priority": st.integers(-(2**31), 2**31 - 1) | st.integers(-100, 100),
        "replace": st.booleans(),
    },
)


@SETTINGS
@given(requests=st.lists(pins, min_size=1, max_size=12))
def test_any_pin_is_refused_or_kept(requests: list[dict[str, Any]]) -> None:
    daemon = Daemon()

    async def scenario() -> None:
        async with running(daemon.config) as stub:
            for fields in requests:
                request = cache_pb2.PinRequest(**{"name": "p", "tokens": [1]} | fields)
                if not await daemon.refused(stub.Pin(request)):
                    daemon.names.add(request.name)
            await daemon.check(stub)
        async with running(daemon.config) as stub, ScriptedEngine(daemon.config):
            await daemon.check(stub)

    run(scenario(), daemon)


# Engines

uint32 = st.one_of(st.integers(0, 3), st.sampled_from([16, 2**10, 2**20, 2**31, 2**32 - 1]))
uint64 = st.one_of(st.sampled_from([0, 1, 6000, 8192, 2**20, 2**36, 2**63, 2**64 - 1]), st.integers(1, 10_000))
groups = st.builds(pb.KVGroup, group_idx=uint32, chunk_tokens=uint32, useful_bytes=uint64, window_chunks=uint32)
layouts = st.builds(
    pb.KVLayout, num_ranks=uint32, rank_bytes=uint64, num_writers=uint32, groups=st.lists(groups, max_size=3)
)
USUAL_GROUP = pb.KVGroup(group_idx=0, chunk_tokens=16, useful_bytes=6000)
hellos = st.fixed_dictionaries(
    {},
    optional={
        "protocol": st.sampled_from([1, 1, 1, 2]),
        "engine_id": st.text(max_size=5) | st.just("x" * 300),
        "pid": uint32,
        "vllm_version": st.text(max_size=5),
        "model_names": st.lists(st.text(max_size=5), max_size=3) | st.just(["m"] * 300),
        "fingerprint": st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3),
        "layout": layouts,
        "store_credits": uint32,
        "ephemeral": st.booleans(),
    },
)


@SETTINGS
@example(requests=[{"layout": pb.KVLayout(num_ranks=1, num_writers=1, rank_bytes=2**64 - 1, groups=[USUAL_GROUP])}])
@given(requests=st.lists(hellos, min_size=1, max_size=8))
def test_any_hello_is_refused_without_a_trace_or_attaches(requests: list[dict[str, Any]]) -> None:
    daemon = Daemon()
    known: set[str] = set()

    async def attached(fields: dict[str, Any]) -> None:
        engine = ScriptedEngine(daemon.config)
        engine.hello = hello_message(**fields)
        try:
            await engine.__aenter__()
        except grpc.aio.AioRpcError:
            await engine.disconnect()
            raise
        if not engine.hello.ephemeral:
            known.add(engine.welcome.namespace_id)
        await engine.__aexit__()

    async def namespaces(stub: Stub) -> set[str]:
        return {each.namespace_id for each in (await status_of(stub)).namespaces}

    async def scenario() -> None:
        async with running(daemon.config) as stub:
            for fields in requests:
                before = await namespaces(stub)
                if await daemon.refused(attached(fields)):
                    assert await namespaces(stub) <= before
            assert known <= await namespaces(stub)
        async with running(daemon.config) as stub:
            assert await namespaces(stub) == known
            async with ScriptedEngine(daemon.config, fingerprint={"another": "1"}) as engine:
                await engine.barrier()

    run(scenario(), daemon)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":1,"a":2}', "NaN", "9" * 5000, "{}", '{"__metadata__":7}'])
def test_strange_json_is_no_bundle(text: str) -> None:
    daemon = Daemon()
    data = text.encode()

    async def scenario() -> None:
        async with running(daemon.config) as stub:
            assert await daemon.refused(stub.Import(iter(pieces_of(len(data).to_bytes(8, "little") + data, "p"))))
            await daemon.check(stub)

    run(scenario(), daemon)
