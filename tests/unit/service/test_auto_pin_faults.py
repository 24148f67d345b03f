"""Automatic pins when engines come and go, files are damaged and the disk hangs."""

import asyncio
from pathlib import Path

import pytest

from kvtier.discovery import auto_pins
from tests.fakes.scripted_engine import ScriptedEngine
from tests.unit.service.test_auto_pins import SYSTEM_TOKENS, ask, attached, auto_config, digest_of, names, send_tokens


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_pins, "SLOW_POLL_S", 0.02)


def test_an_engine_that_comes_later_is_asked_for_what_others_did_not_send(tmp_path: Path) -> None:
    """The list was sent when it changed, to the engines of that moment: a vLLM that started again never got it."""

    async def scenario() -> None:
        config = auto_config(tmp_path)
        async with attached(config) as (stub, first):
            await ask(first, "support", 4)
            await first.receive("prefixes_wanted")
            async with ScriptedEngine(config) as second:
                wanted = (await second.receive("prefixes_wanted")).prefixes_wanted.digests
                assert list(wanted) == [digest_of("support", SYSTEM_TOKENS)]
            async with ScriptedEngine(config) as third:
                await send_tokens(third, "support")
                await third.receive("pin_added")
                assert len(await names(stub)) == 1

    asyncio.run(scenario())
