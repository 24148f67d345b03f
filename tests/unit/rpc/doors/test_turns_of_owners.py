"""What a caller with an owner asks looks through the prompts of all, with turns of the loop in between."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from kvtier._pb import cache_pb2 as pb
from kvtier.access.caller import Caller, Role, enter_call
from kvtier.prompts.book import PromptBook
from kvtier.rpc.doors import owner_rules
from kvtier.rpc.doors.owner_rules import OwnerRules
from kvtier.rpc.remote_message import remote_status
from tests.fakes.clocks import num_turns
from tests.fakes.rows import prompt_row

NUM_PROMPTS = 40
NAMES = [f"p{number:02}" for number in range(NUM_PROMPTS)]
OWN = NAMES[::4]


@pytest.fixture(autouse=True)
def each_step_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.concurrency.turns._TURN_S", 0.0)
    monkeypatch.setattr(owner_rules, "_PAGE", 4)


def book() -> PromptBook:
    prompts = PromptBook()
    for name in NAMES:
        prompts.put(replace(prompt_row(name, f"pin-{name}"), owner="a" if name in OWN else "b"))
    return prompts


def run_as_owner(ask: Callable[[], Awaitable[Any]]) -> tuple[Any, int]:
    async def scenario() -> tuple[Any, int]:
        enter_call(Caller(name="team-a", role=Role.VIEWER, owner="a"))
        return await num_turns(ask())

    return asyncio.run(scenario())


def test_a_list() -> None:
    rules = OwnerRules(book())
    listed, turns = run_as_owner(lambda: rules.visible_after("", 1000))
    assert [prompt.name for prompt in listed] == OWN
    assert turns >= NUM_PROMPTS // 4
    listed, turns = run_as_owner(lambda: rules.visible_after(OWN[2], 3))
    assert [prompt.name for prompt in listed] == OWN[3:6]


def test_a_status() -> None:
    rules = OwnerRules(book())
    status, turns = run_as_owner(lambda: rules.shown_status(pb.DaemonStatus(num_prompts=NUM_PROMPTS)))
    assert (status.num_prompts, status.num_pinned) == (len(OWN), len(OWN))
    assert turns >= NUM_PROMPTS


def test_how_a_daemon_stands_with_the_store() -> None:
    prompts = book()
    kv = mock.Mock(num_bytes=7)
    fleet: Any = mock.MagicMock(url="", host="", problem="", looked_unix_s=0.0)
    fleet.pins.manifests.return_value = [
        mock.Mock(pinned=True, stored=[kv, kv], **{"how.owner": prompt.owner}) for prompt in prompts
    ]
    fleet.pins.manifest.return_value = None
    fleet.pins.is_shared.side_effect = lambda name: name != OWN[0]
    fleet.pins.refused = dict.fromkeys(reversed(NAMES), "why")
    fleet.pins.num_conflicts = fleet.kv.num_uploaded = fleet.kv.num_restored = 0
    fleet.clock.offset_s, fleet.store.url, fleet.cache.prompts = 0.0, "memory://", prompts
    may_see = Caller(name="team-a", role=Role.VIEWER, owner="a").may_see
    with mock.patch("kvtier.rpc.remote_message._spending", return_value=pb.RemoteSpending()):
        status, turns = run_as_owner(lambda: remote_status(fleet, (), may_see))
    num_own = len(OWN)
    assert (status.num_pins, status.num_kv_objects, status.kv_bytes) == (num_own, 2 * num_own, 14 * num_own)
    assert status.num_waiting_pins == 1
    assert [each.name for each in status.refused] == OWN
    assert turns >= 3 * NUM_PROMPTS
