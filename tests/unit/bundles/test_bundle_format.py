"""A bundle's bytes: what goes in comes out, and any other byte is an error that says so."""

import contextlib
import dataclasses
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from kvtier.bundles.bundle_format import FORMAT_VERSION, build_front
from kvtier.bundles.safetensors_header import MAX_HEADER_BYTES, Tensor, build_header
from kvtier.bundles.spool import Spool, in_batches
from kvtier.core import limits
from kvtier.errors import BundleDamagedError
from tests.fakes.bundles import FIRST_CHUNK, LAYOUT, a_bundle, bundle_bytes, opened, read_bundle, sealed
from tests.fakes.chunks import key_of

RECIPE = "{'ünïcode \\ \" recipe'}"


@pytest.fixture(scope="module")
def whole() -> bytes:
    return bundle_bytes(recipe_json=RECIPE)


def refusal(data: bytes, folder: Path) -> str:
    with pytest.raises(BundleDamagedError) as caught:
        read_bundle(data, folder)
    return str(caught.value)


def test_round_trip(whole: bytes, tmp_path: Path) -> None:
    bundle = read_bundle(whole, tmp_path)
    assert bundle.prompt.tokens == tuple(range(48))
    assert bundle.prompt.recipe_json == RECIPE
    assert bundle.keys == tuple(key_of(number) for number in range(3))
    assert bundle.layout == LAYOUT
    front = build_front(bundle)
    assert whole.startswith(front)
    assert len(whole) == len(front) + bundle.data_bytes
    assert list(tmp_path.iterdir()) == []


def test_safe_open_alone_reads_everything(whole: bytes, tmp_path: Path) -> None:
    file = tmp_path / "p.safetensors"
    file.write_bytes(whole)
    bundle, data = a_bundle()
    with safe_open(file, framework="np") as opened_file:
        metadata = opened_file.metadata()
        tensors = {name: opened_file.get_tensor(name) for name in opened_file.keys()}  # noqa: SIM118
    assert metadata["kvtier.bundle"] == str(FORMAT_VERSION)
    assert metadata["kvtier.prompt.name"] == "p"
    assert metadata["kvtier.fingerprint.weights"] == "1"
    assert json.loads(metadata["kvtier.layout"]) == dataclasses.asdict(LAYOUT) | {
        "groups": [dataclasses.asdict(group) for group in LAYOUT.groups]
    }
    assert tensors["kvtier.tokens"].dtype == np.uint32
    assert tensors["kvtier.tokens"].tolist() == list(range(48))
    assert tensors["kvtier.recipe"].tobytes().decode() == RECIPE
    assert tensors["kvtier.xxh3_64"].tolist() == [chunk.stored.checksum for chunk in bundle.chunks]
    assert [bytes(row) for row in tensors["kvtier.sha256"]] == [chunk.sha256 for chunk in bundle.chunks]
    assert {metadata["kvtier.codecs"].split(",")[codec] for codec in tensors["kvtier.codec"]} == {"zstd"}
    assert b"".join(tensors[key_of(number).hex()].tobytes() for number in range(3)) == data


def test_torch_reads_it_too(whole: bytes, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    file = tmp_path / "p.safetensors"
    file.write_bytes(whole)
    tensors = load_file(file)
    assert tensors["kvtier.tokens"].long().tolist() == list(range(48))
    assert tensors["kvtier.xxh3_64"].dtype == torch.uint64


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    changed = bytearray(bundle_bytes())
    # Half of the flips in the header and the index, which are a small part of most files.
    reach = data.draw(st.sampled_from([2200, len(changed)]))
    position, bit = data.draw(st.integers(0, reach - 1)), data.draw(st.integers(0, 7))
    changed[position] ^= 1 << bit
    refusal(bytes(changed), tmp_path_factory.mktemp("flip"))


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 2**20), byte=st.integers(0, 255))
def test_any_byte_of_the_index_is_refused_or_read(
    position: int, byte: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With a recomputed digest the file may be another bundle; it never causes another error."""
    header, data = opened(bundle_bytes(recipe_json=RECIPE))
    at = position % header["kvtier.digest"]["data_offsets"][0]
    changed = sealed(header, data[:at] + bytes([byte]) + data[at + 1 :])
    with contextlib.suppress(BundleDamagedError):
        assert read_bundle(changed, tmp_path_factory.mktemp("index")).prompt.name == "p"


def test_any_shorter_or_longer_file_is_refused(whole: bytes, tmp_path: Path) -> None:
    for length in [0, 1, 7, 8, 9, 100, *range(200, len(whole), 101), len(whole) - 1]:
        assert "cannot be taken in" in refusal(whole[:length], tmp_path), length
    assert "follows its end" in refusal(whole + b"x", tmp_path)
    assert "cut short" in refusal(whole[:-1], tmp_path)


def test_strange_files_are_named_as_such(tmp_path: Path) -> None:
    assert "begin like a bundle" in refusal(b"PK\x03\x04" + b"zip archive" * 1000, tmp_path)
    assert "begin like a bundle" in refusal(bytes(4096), tmp_path)
    assert "no bundle's" in refusal((4088).to_bytes(8, "little") + b"{}".ljust(4088), tmp_path)
    weights = [Tensor("model.embed_tokens.weight", "BF16", (4, 4))]
    assert "no bundle's" in refusal(build_header({"format": "pt"}, weights) + bytes(32), tmp_path)


def test_a_newer_version_says_so(whole: bytes, tmp_path: Path) -> None:
    newer = whole.replace(b'"kvtier.bundle":"3"', b'"kvtier.bundle":"4"')
    assert "format version is 4" in refusal(newer, tmp_path)


def test_a_codec_of_another_kvtier_says_so(tmp_path: Path) -> None:
    message = refusal(bundle_bytes(codec="flux"), tmp_path)
    assert "this kvtier cannot decode it" in message
    assert "'flux'" in message
    assert message.count("upgrade kvtier") == 1


@given(sizes=st.lists(st.integers(1, 50), max_size=20), max_bytes=st.integers(1, 60))
def test_batches_keep_all_in_order(sizes: list[int], max_bytes: int) -> None:
    runs = in_batches(list(range(len(sizes))), sizes.__getitem__, max_bytes)
    assert [item for run in runs for item in run] == list(range(len(sizes)))
    assert all(len(run) == 1 or sum(sizes[item] for item in run) <= max_bytes for run in runs)


def test_the_fronts_length_does_not_depend_on_digests_and_places() -> None:
    bundle, _ = a_bundle()
    moved = [chunk._replace(sha256=b"f" * 32, stored=chunk.stored._replace(offset=2**40)) for chunk in bundle.chunks]
    assert len(build_front(dataclasses.replace(bundle, chunks=moved))) == len(build_front(bundle))


def test_numbers_are_aligned_for_readers_that_map_the_file(whole: bytes) -> None:
    header, _ = opened(whole)
    header_end = 8 + int.from_bytes(whole[:8], "little")
    for name, alignment in (("kvtier.xxh3_64", 8), ("kvtier.tokens", 4)):
        assert (header_end + header[name]["data_offsets"][0]) % alignment == 0


def test_every_prompt_that_may_be_pinned_fits_the_header() -> None:
    longest = Tensor("f" * 2 * limits.KEY_BYTES.most, "U8", (2**40 - 1,))
    entry = (
        len(build_header({}, [longest] * 3)) - len(build_header({}, [longest] * 2)) + 2 * 2
    )  # offsets may have 15 digits
    escaped = 7  # bytes of a control character in JSON, at most
    metadata = escaped * (limits.FINGERPRINT_BYTES.most + 64 * 128) + 6 * escaped * limits.TEXT.max_bytes
    assert entry * limits.MAX_KEYS + metadata < MAX_HEADER_BYTES


def test_a_spool_is_gone_after_an_error(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    with pytest.raises(BundleDamagedError), spool:
        raise BundleDamagedError("x")
    assert list(tmp_path.iterdir()) == []


def test_a_long_header_is_refused_by_its_length(tmp_path: Path) -> None:
    """One of 57 MB took 1.4 GB of memory and 4.8 s of the daemon's loop."""
    message = refusal((97_000_000).to_bytes(8, "little") + bytes(1000), tmp_path)
    assert f"its header has 97000000 bytes, at most {MAX_HEADER_BYTES} are supported" in message


@pytest.mark.parametrize(
    "text",
    [
        '{"__metadata__":' + "[" + "[]," * 2_000_000 + "0]",
        '{"__metadata__":{"kvtier.bundle":"3"},"x":[' + "[]," * 2_000_000 + "0]",
        '{"__metadata__":{' + '"":"",' * 1_000_000,
    ],
    ids=["as metadata", "as a tensor", "texts"],
)
def test_a_header_of_nothing_but_lists_makes_none(text: str, tmp_path: Path) -> None:
    """Ten million of them take a gigabyte of memory, in a header of 30 MB."""
    whole = len(text).to_bytes(8, "little") + text.encode()
    tracemalloc.start()
    try:
        refusal(whole, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(text)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("name", "", "kvtier.prompt.name"),
        ("cache_salt", "x\0", "cache_salt"),
        ("model", "x" * 5000, "model"),
        ("priority", "101", "priority"),
        ("priority", "1.5", "priority"),
        ("priority", "9" * 5000, "priority"),
        ("covered_tokens", "49", "covered_tokens"),
        ("more", "", "__metadata__"),
    ],
)
def test_a_refused_field_of_the_prompt_is_named(
    whole: bytes, tmp_path: Path, field: str, value: str, says: str
) -> None:
    header, data = opened(whole)
    header["__metadata__"][f"kvtier.prompt.{field}"] = value
    if field == "name":
        del header["__metadata__"]["kvtier.prompt.name"]
    assert "in its header, " in (message := refusal(sealed(header, data), tmp_path))
    assert says in message


@pytest.mark.parametrize(
    ("name", "field", "value", "says"),
    [
        (FIRST_CHUNK, "data_offsets", [0, 10], f"{FIRST_CHUNK}.data_offsets"),
        (FIRST_CHUNK, "data_offsets", [10**14, 10**14 + 1], f"{FIRST_CHUNK}.data_offsets"),
        (FIRST_CHUNK, "data_offsets", [-1, 5], "must be written as"),
        (FIRST_CHUNK, "data_offsets", [10**40, 10**40], "must be written as"),
        (FIRST_CHUNK, "shape", [1, 1], f"{FIRST_CHUNK}.data_offsets"),
        (FIRST_CHUNK, "shape", [10**14, 10**14, 10**14], f"{FIRST_CHUNK}.data_offsets"),
        (FIRST_CHUNK, "dtype", "U32", f"{FIRST_CHUNK}.data_offsets"),
        (FIRST_CHUNK, "dtype", "F8_E4M3", f"{FIRST_CHUNK}.dtype"),
        (FIRST_CHUNK, "dtype", 7, "must be written as"),
        (FIRST_CHUNK, "more", 7, "must be written as"),
        ("kvtier.tokens", "dtype", "F32", "kvtier.tokens"),
        ("kvtier.tokens", "shape", [12, 4], "kvtier.tokens"),
        ("kvtier.sha256", "shape", [32, 3], "kvtier.sha256"),
        ("kvtier.xxh3_64", "shape", [6], "kvtier.xxh3_64"),
    ],
)
def test_a_refused_tensor_is_named(whole: bytes, tmp_path: Path, name: str, field: str, value: Any, says: str) -> None:
    header, data = opened(whole)
    header[name][field] = value
    assert says in refusal(sealed(header, data), tmp_path)


def test_tensors_that_overlap_repeat_or_leave_a_hole_are_refused(whole: bytes, tmp_path: Path) -> None:
    header, data = opened(whole)
    text = json.dumps(header, separators=(",", ":"))
    entry = json.dumps(header[FIRST_CHUNK], separators=(",", ":"))

    def refused_with(changed: str) -> str:
        return refusal(len(changed).to_bytes(8, "little") + changed.encode() + data, tmp_path)

    assert "each name may come once" in refused_with(text[:-1] + f',"{FIRST_CHUNK}":{entry}}}')
    assert "data_offsets" in refused_with(text[:-1] + f',"00":{entry}}}')
    assert "data_offsets" in refused_with(text[:-1] + ',"00":{"dtype":"U8","shape":[1],"data_offsets":[90000,90001]}}')
    assert "must be written as" in refused_with(text + "x")
    del header[FIRST_CHUNK]
    assert "data_offsets" in refused_with(json.dumps(header, separators=(",", ":")))


@pytest.mark.parametrize(
    ("tensor", "data", "says"),
    [
        ("kvtier.codec", b"\x01", "kvtier.codec"),
        ("kvtier.recipe", b"\xff", "recipe_json"),
        ("kvtier.recipe", b"\0", "recipe_json"),
    ],
)
def test_what_the_index_says_is_checked(whole: bytes, tmp_path: Path, tensor: str, data: bytes, says: str) -> None:
    header, rest = opened(whole)
    at = header[tensor]["data_offsets"][0]
    changed = rest[:at] + data + rest[at + len(data) :]
    assert says in refusal(sealed(header, changed), tmp_path)


def test_a_name_that_is_no_key_is_refused(whole: bytes, tmp_path: Path) -> None:
    for name in ("zz", "AB" * 36, "00", "00" * 32 + "00000007", "00" * 90):
        header, data = opened(whole)
        header = {name if old == FIRST_CHUNK else old: value for old, value in header.items()}
        assert "in its header" in refusal(sealed(header, data), tmp_path), name
