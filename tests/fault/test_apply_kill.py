"""kill -9 in the middle of an apply or a rename: all of it is there afterwards, or nothing of it.

Each round applies another generation of the same set: prompts get another source and other labels, some come, some
go. `make chaos` makes this run long: KVTIER_CHAOS_KILLS kills.
"""

import asyncio
import os
import random
from collections.abc import Mapping
from pathlib import Path

import grpc
import pytest

from kvtier._pb import cache_pb2
from tests.fakes.daemon_process import daemon, is_gone, kill
from tests.fakes.operator import Stub, apply
from tests.fakes.scripted_engine import DEADLINE_S, config_in

NUM_KILLS = int(os.environ.get("KVTIER_CHAOS_KILLS", "8"))
SEED = int(os.environ.get("KVTIER_CHAOS_SEED", "20260"))
NUM_PROMPTS = 120
State = dict[str, tuple[bool, str, str]]
"""By name: pinned, generation of its labels, digest of its source."""


def generation(number: int) -> dict[str, cache_pb2.PinRequest]:
    """Return the prompts of a generation, by name; every fifth is in each second one only."""
    return {
        f"p{index}": cache_pb2.PinRequest(
            name=f"p{index}",
            recipe_json=f'{{"kind": "text", "content": "{number} {index}"}}',
            owner="team",
            labels=cache_pb2.Labels(values={"generation": str(number)}),
        )
        for index in range(NUM_PROMPTS)
        if index % 5 or number % 2
    }


async def state_of(stub: Stub) -> State:
    """Return what the daemon has."""
    state: State = {}
    token = ""
    while True:
        request = cache_pb2.ListPromptsRequest(page_token=token)
        page = await stub.ListPrompts(request, timeout=DEADLINE_S)
        state |= {
            each.name: (each.pinned, each.labels.get("generation", ""), each.source_digest) for each in page.prompts
        }
        if not (token := page.next_page_token):
            return state


def unpinned(before: State, wanted: Mapping[str, object]) -> list[str]:
    """Return the pins that a generation has not."""
    return [name for name, (pinned, *_) in before.items() if pinned and name not in wanted]


@pytest.mark.timeout(60 + 30 * NUM_KILLS)
def test_an_apply_is_whole_or_was_not(tmp_path: Path) -> None:
    rng, config = random.Random(SEED), config_in(tmp_path)
    outcomes = {"before": 0, "after": 0, "answered": 0}

    async def scenario() -> None:
        before: State = {}
        for number in range(NUM_KILLS):
            wanted = generation(number)
            async with daemon(config) as (process, stub):
                assert await state_of(stub) == before
                gone = unpinned(before, wanted)
                await apply(stub, *wanted.values(), unpin=gone, dry_run=True)
                assert await state_of(stub) == before, "a dry run changes nothing"
                applying = asyncio.create_task(apply(stub, *wanted.values(), unpin=gone))
                if number:  # the first kill is before anything is sent, the second after the answer
                    await asyncio.wait({applying}, timeout=None if number == 1 else rng.random() * 0.15)
                kill(process)
                (outcome,) = await asyncio.gather(applying, return_exceptions=True)
                is_answered = not isinstance(outcome, BaseException)
                assert is_answered or (isinstance(outcome, grpc.aio.AioRpcError) and is_gone(outcome)), outcome
            async with daemon(config) as (_, stub):
                now = await state_of(stub)
                after = {name: (True, str(number)) for name in wanted}
                is_after = {name: each[:2] for name, each in now.items() if each[0]} == after
                if not is_after:
                    assert now == before
                    assert not is_answered, "it was acknowledged"
                outcomes["answered" if is_answered else "after" if is_after else "before"] += 1
                before = now

    asyncio.run(scenario())
    print(f"\n{NUM_KILLS} kills in the middle of {NUM_PROMPTS} prompts: {outcomes}")
    assert outcomes["before"]
    assert outcomes["answered"]


@pytest.mark.timeout(60 + 30 * NUM_KILLS)
def test_a_rename_is_whole_or_was_not(tmp_path: Path) -> None:
    rng, config = random.Random(SEED), config_in(tmp_path)

    async def scenario() -> None:
        name = "first"
        async with daemon(config) as (_, stub):
            pin = cache_pb2.PinRequest(name=name, tokens=range(40))
            pin_id = (await stub.Pin(pin, timeout=DEADLINE_S)).pin_id
        for number in range(NUM_KILLS // 2):
            new_name = f"name{number}"
            async with daemon(config) as (process, stub):
                request = cache_pb2.RenamePromptRequest(name=name, new_name=new_name)
                renaming = asyncio.ensure_future(stub.RenamePrompt(request, timeout=DEADLINE_S))
                await asyncio.wait({renaming}, timeout=rng.random() * 0.02)
                kill(process)
                outcome: object = (await asyncio.gather(renaming, return_exceptions=True))[0]
                is_answered = not isinstance(outcome, Exception)
                assert not isinstance(outcome, Exception) or is_gone(outcome)
                names = {new_name} if is_answered else {name, new_name}
            async with daemon(config) as (_, stub):
                (listed,) = (await stub.ListPrompts(cache_pb2.ListPromptsRequest(), timeout=DEADLINE_S)).prompts
                assert listed.name in names
                assert (listed.pin_id, listed.pinned) == (pin_id, True)
                name = listed.name

    asyncio.run(scenario())
