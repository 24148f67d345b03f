"""Prompts are secrets: no repr, error, log event or metric shows text, tokens or salts."""

import ast
import asyncio
import dataclasses
import importlib
import inspect
import logging
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import kvtier
from kvtier import errors
from kvtier._pb import cache_pb2
from kvtier.errors import InvalidArgumentError
from kvtier.obs.log import _WITHHELD
from tests.fakes.operator import make_durable, status_of
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running

ROOT = Path(__file__).parents[3]
SECRET_FIELDS = {"tokens", "token_ids", "cache_salt", "recipe_json", "before", "examples", "secret", "api_key"}
COUNTS = ("int", "float", int, float, int | None)
SALT, TEXT = "saffron-and-salt", "the parrot of the minister"
TOKENS = list(range(987_000, 987_160))


def values() -> Iterator[type[Any]]:
    """Yield every dataclass and named tuple of the daemon, the client and the library."""
    for module in pkgutil.walk_packages(kvtier.__path__, "kvtier."):
        if "._pb" in module.name or module.name.endswith("__main__"):
            continue
        for _, found in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if found.__module__ == module.name:
                yield found


def test_no_repr_shows_a_secret_field() -> None:
    """Values come into messages of exceptions, asyncio's warnings and the assertions of tests by their repr."""
    shown = []
    for found in values():
        if dataclasses.is_dataclass(found):
            shown += [f"{found.__name__}.{each.name}" for each in dataclasses.fields(found)
                      if each.name in SECRET_FIELDS and each.repr
                      and each.type not in COUNTS]  # fmt: skip
        elif SECRET_FIELDS & set(getattr(found, "_fields", ())) and "__repr__" not in vars(found):
            shown.append(found.__name__)
    assert sorted(set(shown)) == []


@pytest.mark.parametrize("field", ["tokens", "cache_salt", "recipe_json", "pin.cache_salt", "kvtier.prompt.cache_salt"])
def test_an_error_names_a_secret_field_and_withholds_its_value(field: str) -> None:
    error = InvalidArgumentError(field, SALT, "is too long")
    assert SALT not in str(error) + repr(error)
    assert field in str(error)
    assert "987" not in str(InvalidArgumentError(field, TOKENS, "are too many"))


def test_how_many_is_no_secret() -> None:
    assert "5000" in str(InvalidArgumentError("tokens", 5000, "are too many"))


def events() -> Iterator[tuple[str, str, list[str]]]:
    """Yield file, event and names of the fields of every call of `log_event`."""
    for package in (ROOT / "kvtier", ROOT / "connector"):
        for path in package.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "log_event":
                    names = [keyword.arg for keyword in node.keywords if keyword.arg]
                    event = node.args[1].value if isinstance(node.args[1], ast.Constant) else "?"
                    yield path.name, str(event), names


def test_no_event_has_a_field_for_a_secret() -> None:
    found = list(events())
    assert len(found) > 100
    secret = (SECRET_FIELDS - {"before"} | {"prompt_text", "messages", "content", "text", "recipe"}) - _WITHHELD
    assert [each for each in found if secret & set(each[2])] == []


def test_no_event_formats_an_attribute_that_is_secret() -> None:
    """Not under another name either, as `problem=row.cache_salt`."""
    for package in (ROOT / "kvtier", ROOT / "connector"):
        for path in package.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "log_event":
                    for inner in ast.walk(node):
                        name = inner.attr if isinstance(inner, ast.Attribute) else ""
                        is_counted = f"len({ast.unparse(inner)})" in ast.unparse(node) if name else False
                        assert name not in SECRET_FIELDS or is_counted, f"{path.name}: {ast.unparse(node)}"


def test_a_daemon_that_is_given_secrets_shows_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Pins, refusals, exports, a damaged bundle, lists, and what is counted: at the lowest level."""
    caplog.set_level(logging.DEBUG)
    recipe = f'{{"kind": "text", "text": "{TEXT}"}}'
    said: list[str] = []
    keys = [chunk_key(number) for number in range(5)]

    async def refused(call: Any) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        said.append(str(caught.value.details()))

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, keys)
            secret: dict[str, Any] = {"tokens": TOKENS, "cache_salt": SALT, "recipe_json": recipe}
            await stub.Pin(cache_pb2.PinRequest(name="a", **secret))
            await refused(stub.Pin(cache_pb2.PinRequest(name="a", **secret | {"tokens": TOKENS[:100]})))
            await refused(stub.Pin(cache_pb2.PinRequest(name="b", public=True, **secret)))
            await refused(stub.Pin(cache_pb2.PinRequest(name="b", **secret | {"cache_salt": SALT * 500})))
            await refused(stub.Pin(cache_pb2.PinRequest(name="b", **secret | {"cache_salt": SALT + "\0"})))
            await refused(stub.Pin(cache_pb2.PinRequest(name="?", **secret)))
            await refused(stub.Pin(cache_pb2.PinRequest(name="b", priority=10**6, **secret)))
            data = b"".join([piece.data async for piece in stub.Export(cache_pb2.ExportRequest(name="p"))])

            async def messages() -> Any:
                yield cache_pb2.ImportMessage(start=cache_pb2.ImportStart(name="c"))
                yield cache_pb2.ImportMessage(piece=cache_pb2.BundlePiece(data=data[:-5] + b"xxxxx"))

            await refused(stub.Import(messages()))
            await refused(stub.Explain(cache_pb2.ExplainRequest(tokens=TOKENS, cache_salt=SALT * 500)))
            said.append(str((await status_of(stub)).counters))
        async with running(config):
            pass

    asyncio.run(scenario())
    said += [str(vars(record)) + record.getMessage() for record in caplog.records]
    for secret in (SALT, TEXT, str(TOKENS[3]), str(TOKENS[101])):
        assert [text for text in said if secret in text] == []


def test_every_error_has_a_bounded_text_of_its_own() -> None:
    """The root shortens what it quotes; none builds its text elsewhere."""
    for _, found in inspect.getmembers(errors, inspect.isclass):
        if issubclass(found, errors.KvtierError):
            assert "__str__" not in vars(found), found
