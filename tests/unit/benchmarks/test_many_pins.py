"""Pins written past the daemon are what a daemon finds: pinned prompts, durable once their chunks are there."""

import asyncio
from pathlib import Path

from benchmarks.measuring.daemon_fixtures import FINGERPRINT, LAYOUT
from benchmarks.measuring.many_pins import fill_with_pins, make_durable
from kvtier._pb import cache_pb2
from kvtier.core.fingerprint import namespace_id
from kvtier.ledger import BindingRow, Ledger, NamespaceRow
from tests.fakes.scripted_engine import chunk_key, config_in, running

COUNT = 5


def test_a_daemon_finds_the_pins_and_their_chunks(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    disk_dir = config.disk.disk_dir
    disk_dir.chmod(0o700)
    fill_with_pins(disk_dir, COUNT, tokens_each=40)
    bind_all(disk_dir)
    assert make_durable(disk_dir) == 2 * COUNT

    async def listed() -> list[cache_pb2.PromptStatus]:
        async with running(config) as stub:
            return list((await stub.ListPrompts(cache_pb2.ListPromptsRequest())).prompts)

    prompts = asyncio.run(listed())
    assert [prompt.state for prompt in prompts] == [cache_pb2.PromptStatus.DURABLE] * COUNT
    assert {prompt.num_tokens for prompt in prompts} == {40}
    assert len({prompt.tokens_digest for prompt in prompts}) == COUNT


def bind_all(disk_dir: Path) -> None:
    """What an engine does: two chunks for each pin."""
    own_id = namespace_id(FINGERPRINT)
    ledger = Ledger.open(disk_dir / "ledger.sqlite")
    ledger.put_namespace(
        NamespaceRow(
            namespace_id=own_id, model="model", fingerprint=FINGERPRINT, layout=LAYOUT, created_unix_s=1, seen_unix_s=1
        )
    )
    for prompt in ledger.load().prompts:
        keys = (chunk_key(f"{prompt.name} 0"), chunk_key(f"{prompt.name} 1"))
        ledger.promises.put_binding(BindingRow(pin_id=prompt.pin_id, namespace_id=own_id, keys=keys, covered_tokens=32))
    ledger.close()


def test_equal_seeds_pin_equal_tokens(tmp_path: Path) -> None:
    tokens = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        fill_with_pins(tmp_path / name, 2, tokens_each=8, seed=seed)
        ledger = Ledger.open(tmp_path / name / "ledger.sqlite")
        tokens.append(sorted(tuple(prompt.tokens) for prompt in ledger.load().prompts))
        ledger.close()
    assert tokens[0] == tokens[1] != tokens[2]
