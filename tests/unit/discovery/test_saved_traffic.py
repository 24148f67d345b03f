"""What was counted, in files that anything may have happened to: what can be read is taken, the rest is set to zero."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.discovery.choices import PinnedPrefix
from kvtier.discovery.namespace_traffic import ChangingPlace, NamespaceTraffic, PinUse
from kvtier.discovery.saved_sketch import MAX_SKETCH_BYTES
from kvtier.discovery.saved_traffic import FOLDER_NAME, MAX_USES_BYTES, SavedTraffic
from kvtier.discovery.seen import SeenPrefix, SeenRequest

DIGEST = b"d" * 16


def traffic() -> NamespaceTraffic:
    found = NamespaceTraffic()
    for prompt in range(3):
        found.observe(SeenRequest([SeenPrefix(DIGEST, 1024, True)], prompt, 2000), 1000.0, 1e9)
    prefix = PinnedPrefix(DIGEST, 1024, True, None)
    found.uses[DIGEST] = PinUse(
        name="auto-1", prefix=prefix, num_requests=3, saved_tokens=9, saved_s=0.5, last_used_unix_s=1e9
    )
    found.put_place(
        ChangingPlace(
            digest=b"", num_stable_tokens=5, num_tokens=9, num_prompts=8, before="Today is", examples=("a", "b"),
            seen_unix_s=1e9,
        )
    )  # fmt: skip
    return found


@pytest.fixture
def saved(tmp_path: Path) -> SavedTraffic:
    files = SavedTraffic(tmp_path)
    files.write("n", files.encode(traffic()))
    return files


def test_what_was_written_is_read(saved: SavedTraffic) -> None:
    loaded, expected = saved.load("n"), traffic()
    assert (loaded.uses, loaded.places) == (expected.uses, expected.places)
    assert len(loaded.sketch) == 1


def long_sketch(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(2**40)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


SKETCHES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "noise": lambda path: path.write_bytes(bytes(range(256)) * 40),
    "a number of counters that it has not": lambda path: path.write_bytes(
        path.read_bytes()[:10] + b"\xff" * 4 + path.read_bytes()[14:]
    ),
    "a terabyte": long_sketch,
    "a folder": folder_instead,
}


@pytest.mark.parametrize("damage", SKETCHES.values(), ids=SKETCHES)
def test_a_damaged_sketch_costs_the_counts_alone(
    saved: SavedTraffic, tmp_path: Path, damage: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    damage(tmp_path / FOLDER_NAME / "n.sketch")
    loaded = saved.load("n")
    assert len(loaded.sketch) == 0
    assert [use.name for use in loaded.uses.values()] == ["auto-1"]
    assert [record.getMessage() for record in caplog.records] == ["saved_traffic_unreadable"]


def changed(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda value: value["uses"][0].update(fields)


def place(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda value: value["places"][0].update(fields)


USES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an endless number of tokens": changed(prefix=[DIGEST.hex(), float("inf"), True, ""]),
    "tokens that are none": changed(prefix=[DIGEST.hex(), -1, True, ""]),
    "a short digest": changed(prefix=["00", 1024, True, ""]),
    "a name that is a list": changed(name=["auto-1"]),
    "a name that is none": changed(name="\x1b[2J"),
    "seconds that are no number": changed(saved_s=float("nan")),
    "a count that is text": changed(num_requests="3"),
    "a use without a name": lambda value: value["uses"][0].pop("name"),
    "uses that are none": lambda value: value.update(uses=5),
    "places that are none": lambda value: value.update(places={}),
    "text that is a number": place(before=5),
    "endless text": place(before="x" * 2000),
    "too many examples": place(examples=["x"] * 4),
    "a moment that is none": place(seen_unix_s=float("-inf")),
    "a digest that is no base64": place(digest="*"),
    "a place beyond any prompt": place(num_tokens=2**40),
}


@pytest.mark.parametrize("damage", USES.values(), ids=USES)
def test_uses_that_cannot_be_cost_themselves_alone(
    saved: SavedTraffic, tmp_path: Path, damage: Callable[[dict[str, Any]], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """An endless number or a list for a name ended the task that pins, and no engine could attach any longer."""
    path = tmp_path / FOLDER_NAME / "n.json"
    value = json.loads(path.read_bytes())
    damage(value)
    path.write_text(json.dumps(value))
    loaded = saved.load("n")
    assert len(loaded.sketch) == 1
    assert (loaded.uses, loaded.places) == ({}, {})
    assert [record.getMessage() for record in caplog.records] == ["saved_traffic_unreadable"]
    assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 10**6, b"\xff\xfe", b"5", b"null"])
def test_any_bytes_are_no_uses(saved: SavedTraffic, tmp_path: Path, content: bytes) -> None:
    (tmp_path / FOLDER_NAME / "n.json").write_bytes(content)
    loaded = saved.load("n")
    assert len(loaded.sketch) == 1
    assert not loaded.uses


def test_more_than_was_written_is_not_read(saved: SavedTraffic, tmp_path: Path) -> None:
    with (tmp_path / FOLDER_NAME / "n.json").open("r+b") as file:
        file.truncate(2**40)
    assert not saved.load("n").uses
    assert MAX_USES_BYTES < 2**25
    assert MAX_SKETCH_BYTES < 2**23


def test_a_place_is_kept_byte_for_byte(saved: SavedTraffic) -> None:
    files = SavedTraffic(saved._folder.parent)
    found = traffic()
    hostile = ChangingPlace(
        digest=DIGEST, num_stable_tokens=1, num_tokens=2, num_prompts=3, before="\x1b[2J\n\u202e", examples=(),
        seen_unix_s=0.0,
    )  # fmt: skip
    found.put_place(hostile)
    files.write("n", files.encode(found))
    assert base64.b64encode(DIGEST).decode() in (saved._folder / "n.json").read_text()
    assert hostile in files.load("n").places.values()
