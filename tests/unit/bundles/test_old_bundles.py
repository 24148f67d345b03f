"""Bundles of versions 1 and 2: `tests/data/bundles` keeps one of each, as the kvtier of that time exported it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvtier._pb import cache_pb2
from kvtier.errors import BundleDamagedError
from tests.fakes.bundles import old_bundle, opened_old, read_bundle, sealed_old
from tests.fakes.scripted_engine import chunk_key, running
from tests.unit.bundles.test_round_trip import assert_serves, attach_once, export, home, import_


@pytest.mark.parametrize(("version", "priority"), [(1, 0), (2, 4)])
def test_an_old_bundle_is_imported_and_exported_in_todays_form(version: int, priority: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        config = home(tmp_path, "a")
        await attach_once(config)
        async with running(config) as stub:
            status = await import_(stub, old_bundle(version))
            assert (status.name, status.state) == ("p", cache_pb2.PromptStatus.DURABLE)
            assert (status.priority, status.recipe_json) == (priority, '{"kind": "text"}')
            assert b'"kvtier.bundle":"3"' in await export(stub)
        await assert_serves(config)

    asyncio.run(scenario())


def refusal(header: dict[str, Any], data: bytes, folder: Path) -> str:
    with pytest.raises(BundleDamagedError) as caught:
        read_bundle(sealed_old(header, data), folder)
    return str(caught.value)


def test_a_sealed_old_bundle_is_read(tmp_path: Path) -> None:
    bundle = read_bundle(sealed_old(*opened_old(old_bundle(2))), tmp_path)
    assert bundle.keys == tuple(chunk_key(number) for number in range(5))


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    whole = old_bundle(2)
    for position in (3, *range(8, len(whole), 97), len(whole) - 1):
        changed = bytearray(whole)
        changed[position] ^= 16
        with pytest.raises(BundleDamagedError):
            read_bundle(bytes(changed), tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_salt", 7),
        ("model", None),
        ("recipe_json", {}),
        ("lora_path", ["x"]),
        ("tokens", [1, 2.5]),
        ("tokens", [True]),
        ("tokens", [-1]),
        ("tokens", []),
        ("tokens", "123"),
        ("priority", 101),
        ("priority", "1"),
        ("more", ""),
    ],
)
def test_a_refused_field_of_the_prompt_is_named(tmp_path: Path, field: str, value: object) -> None:
    header, data = opened_old(old_bundle(2))
    header["__metadata__"]["kvtier.prompt"][field] = value
    assert "in its header, " in (message := refusal(header, data, tmp_path))
    assert field in message


@pytest.mark.parametrize(
    ("field", "value"),
    [("keys", []), ("keys", None), ("keys", ["00"]), ("covered_tokens", "80"), ("covered_tokens", 81)],
)
def test_a_refused_field_of_the_binding_is_named(tmp_path: Path, field: str, value: object) -> None:
    header, data = opened_old(old_bundle(2))
    header["__metadata__"]["kvtier.binding"][field] = value
    assert "in its header, " in refusal(header, data, tmp_path)


@pytest.mark.parametrize(
    ("field", "value"), [("raw_bytes", 1), ("xxh3_64", "0"), ("sha256", 5), ("codec", ""), ("codec", None), ("x", 1)]
)
def test_a_refused_field_of_a_chunk_is_named(tmp_path: Path, field: str, value: object) -> None:
    header, data = opened_old(old_bundle(2))
    header["__metadata__"]["kvtier.chunks"][chunk_key(0).hex()][field] = value
    assert "kvtier.c" in refusal(header, data, tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":1,"a":2}', "NaN", "9" * 5000, "[]", ""])
def test_strange_json_is_refused(text: str, tmp_path: Path) -> None:
    header, data = opened_old(old_bundle(2))
    header["__metadata__"]["kvtier.prompt"] = text
    assert "kvtier.prompt" in refusal(header, data, tmp_path)
