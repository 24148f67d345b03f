"""Files beside `kvtier rollback` and `kvtier rename`: what docs/apply.md says of them, with a real daemon."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import pytest

from kvtier import Client, Prompt, PromptState
from kvtier.core.layout import ChunkKey
from kvtier.prompts import replacements
from tests.fakes.operator import until
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running
from tests.unit.cli.fake_vllm import FakeVllm

FIRST, SECOND = "You are a parrot. ", "You are another bird. "


def prompts(*prompts: tuple[str, str]) -> str:
    return "prompts:\n" + "".join(f"- {{name: {name}, system: '{text * 4}'}}\n" for name, text in prompts)


def keys(text: str) -> Sequence[ChunkKey]:
    first = 0 if text == FIRST else 100
    return [chunk_key(number) for number in range(first, first + 4)]


class World:
    """A daemon, an engine, and a file."""

    def __init__(self, client: Client, engine: ScriptedEngine, path: Path) -> None:
        self.client, self._engine, self._path = client, engine, path

    async def changes(self, text: str, *, prune: bool = False) -> dict[str, str]:
        """Return what a file would change."""
        self._path.write_text(text)
        done = await asyncio.to_thread(self.client.apply, str(self._path), prune=prune, dry_run=True)
        return {change.name: change.kind.value for change in done.changes}

    async def apply(self, text: str) -> Sequence[str]:
        """Apply a file; return the names of pins that it leaves."""
        self._path.write_text(text)
        return (await asyncio.to_thread(self.client.apply, str(self._path), warm=False)).not_in_files

    async def compute(self, name: str, text: str, num_stored: int = 4) -> None:
        """Have the engine recognize a prompt and store its chunks; a version takes the name then."""
        made = await asyncio.to_thread(self.client.get, name)
        await self._engine.bind(made.pin_id, keys(text))
        if num_stored:
            await self._engine.store(keys(text)[:num_stored])
        serving = name.partition("@")[0]

        async def serves() -> bool:
            now = await self.of(serving)
            return now.pin_id == made.pin_id and now.state is PromptState.DURABLE

        await until(serves)

    async def of(self, name: str) -> Prompt:
        return await asyncio.to_thread(self.client.get, name)

    async def names(self) -> list[str]:
        return [prompt.name for prompt in await asyncio.to_thread(self.client.list)]


async def roll_back(world: World) -> None:
    await world.apply(prompts(("p", FIRST)))
    await world.compute("p", FIRST)
    await world.apply(prompts(("p", SECOND)))
    assert await world.names() == ["p", "p@2"]
    # The file is reverted while its version waits: that one ends.
    assert await world.changes(prompts(("p", FIRST))) == {"p": "replace"}
    await world.apply(prompts(("p", FIRST)))
    assert await world.names() == ["p"]
    await world.apply(prompts(("p", SECOND)))
    await world.compute("p@2", SECOND)
    # A rollback beside the file: the next apply ends it.
    version = await asyncio.to_thread(world.client.rollback, "p")
    await world.compute(version.name, FIRST)
    assert (await world.of("p")).labels == {"kvtier/set": "default"}
    assert await world.changes(prompts(("p", SECOND))) == {"p": "replace"}
    # With the file reverted, too, nothing differs.
    assert await world.changes(prompts(("p", FIRST))) == {"p": "unchanged"}


async def rename(world: World) -> None:
    await world.apply(prompts(("p", FIRST)))
    await world.compute("p", FIRST)
    await asyncio.to_thread(world.client.rename, "p", "q")
    # Renamed in the file, too: nothing differs.
    assert await world.changes(prompts(("q", FIRST)), prune=True) == {"q": "unchanged"}
    # Else the name of the file is a new prompt, and the other is in no file.
    assert await world.changes(prompts(("p", FIRST)), prune=True) == {"p": "create", "q": "unpin"}
    assert await world.apply(prompts(("p", FIRST))) == ["q"]
    await world.compute("p", FIRST, num_stored=0)
    assert await world.names() == ["p", "q"]


@pytest.mark.parametrize("scenario", [roll_back, rename])
def test_files_beside_commands(
    tmp_path: Path,
    vllm: FakeVllm,
    monkeypatch: pytest.MonkeyPatch,
    scenario: Callable[[World], Coroutine[None, None, None]],
) -> None:
    monkeypatch.setattr(replacements, "ATTACH_S", 0.0)

    async def run() -> None:
        config = config_in(tmp_path)
        async with running(config), ScriptedEngine(config) as engine:
            with Client(config.server.socket, url=vllm.url) as client:
                await scenario(World(client, engine, tmp_path / "prompts.yaml"))

    asyncio.run(run())
