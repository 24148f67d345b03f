"""A bundle's bytes: what goes in comes out, and any other byte is an error that says so."""

import dataclasses
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.bundles import bundle_format
from kvtier.bundles.bundle_format import Bundle, BundleChunk, BundlePrompt, build_header
from kvtier.bundles.header_parsing import header_bytes_of
from kvtier.bundles.spool import Spool, in_batches
from kvtier.errors import BundleDamagedError, InvalidArgumentError
from tests.fakes.bundles import LAYOUT, bundle_bytes, opened, read_bundle, sealed
from tests.fakes.chunks import key_of


@pytest.fixture(scope="module")
def whole() -> bytes:
    return bundle_bytes()


def refusal(data: bytes, folder: Path) -> str:
    with pytest.raises(BundleDamagedError) as caught:
        read_bundle(data, folder)
    return str(caught.value)


def test_round_trip(whole: bytes, tmp_path: Path) -> None:
    bundle = read_bundle(whole, tmp_path)
    assert bundle.prompt.tokens == tuple(range(48))
    assert bundle.keys == tuple(key_of(number) for number in range(3))
    assert bundle.layout == LAYOUT
    assert len(whole) == bundle.data_bytes + 4096
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_is_a_safetensors_file(whole: bytes) -> None:
    from safetensors import deserialize

    tensors = dict(deserialize(whole))
    assert set(tensors) == {key_of(number).hex() for number in range(3)}


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    changed = bytearray(bundle_bytes())
    # Half of the flips in the JSON, which is a small part of the file.
    reach = data.draw(st.sampled_from([2200, len(changed)]))
    position, bit = data.draw(st.integers(0, reach - 1)), data.draw(st.integers(0, 7))
    changed[position] ^= 1 << bit
    refusal(bytes(changed), tmp_path_factory.mktemp("flip"))


def test_any_shorter_or_longer_file_is_refused(whole: bytes, tmp_path: Path) -> None:
    for length in [0, 1, 7, 8, 9, 100, 4095, 4096, 4097, *range(4200, len(whole), 501), len(whole) - 1]:
        assert "cannot be taken in" in refusal(whole[:length], tmp_path), length
    assert "follows its end" in refusal(whole + b"x", tmp_path)
    assert "cut short" in refusal(whole[:-1], tmp_path)


def test_strange_files_are_named_as_such(tmp_path: Path) -> None:
    assert "begin like a bundle" in refusal(b"PK\x03\x04" + b"zip archive" * 1000, tmp_path)
    assert "no bundle's" in refusal((4088).to_bytes(8, "little") + b"{}".ljust(4088), tmp_path)


def test_a_newer_version_says_so(whole: bytes, tmp_path: Path) -> None:
    newer = whole.replace(b'"kvtier.bundle":"1"', b'"kvtier.bundle":"3"')
    assert "format version is 3" in refusal(newer, tmp_path)


def test_an_older_kvtier_can_read_a_bundle_without_a_priority(tmp_path: Path) -> None:
    plain, important = bundle_bytes(), bundle_bytes(priority=-3)
    assert b'"kvtier.bundle":"1"' in plain
    assert b"priority" not in plain
    assert b'"kvtier.bundle":"2"' in important
    assert (read_bundle(plain, tmp_path).prompt.priority, read_bundle(important, tmp_path).prompt.priority) == (0, -3)


def test_a_codec_of_another_kvtier_says_so(tmp_path: Path) -> None:
    told = refusal(bundle_bytes(codec="flux"), tmp_path)
    assert "this kvtier cannot decode it" in told
    assert "'flux'" in told
    assert told.count("upgrade kvtier") == 1


@pytest.mark.parametrize("name", ['"kvtier.digest":"' + "0" * 64 + '"', "ünïcode", 'a\\b"c'])
def test_a_prompt_cannot_disturb_the_digest(name: str, tmp_path: Path) -> None:
    assert read_bundle(bundle_bytes(recipe_json=name), tmp_path).prompt.recipe_json == name


@given(sizes=st.lists(st.integers(1, 50), max_size=20), room=st.integers(1, 60))
def test_batches_keep_all_in_order(sizes: list[int], room: int) -> None:
    runs = in_batches(list(range(len(sizes))), sizes, room)
    assert [item for run in runs for item in run] == list(range(len(sizes)))
    assert all(len(run) == 1 or sum(sizes[item] for item in run) <= room for run in runs)


def test_header_length_does_not_depend_on_digests() -> None:
    chunk = BundleChunk(key=key_of(1), stored_bytes=5, raw_bytes=5, codec="raw", checksum=7, sha256="0" * 64)
    prompt = BundlePrompt(name="p", tokens=(1,), model="", lora_name="", lora_path="", cache_salt="", recipe_json="")
    bundle = Bundle(
        prompt=prompt,
        model="m",
        fingerprint={"a": "1"},
        layout=LAYOUT,
        keys=(key_of(1),),
        covered_tokens=16,
        chunks=(chunk,),
    )
    other = dataclasses.replace(bundle, chunks=(dataclasses.replace(chunk, sha256="f" * 64),))
    assert len(build_header(bundle)) == len(build_header(other)) == 4096
    assert header_bytes_of(build_header(bundle)[:8], 10_000) == 4088


def test_a_spool_is_gone_after_an_error(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    with pytest.raises(BundleDamagedError), spool:
        spool.header(8)
    assert list(tmp_path.iterdir()) == []


def test_a_long_header_is_refused_by_its_length(tmp_path: Path) -> None:
    """One of 57 MB took 1.4 GB of memory and 4.8 s of the daemon's loop."""
    told = refusal((57_000_000).to_bytes(8, "little") + bytes(1000), tmp_path)
    assert "its header has 57000000 bytes, at most 33554432 are supported" in told


def test_a_header_of_nothing_but_lists_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """Ten million of them take a gigabyte of memory, in a header of 30 MB."""
    text = b"[" + b"[]," * 2_000_000 + b"0]"
    whole = len(text).to_bytes(8, "little") + text
    tracemalloc.start()
    try:
        assert "no bundle's" in refusal(whole, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(text)
    finally:
        tracemalloc.stop()


def test_a_prompt_of_too_many_chunks_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_format, "MAX_HEADER_BYTES", 2000)
    with pytest.raises(InvalidArgumentError, match=r"3 chunks and 48 tokens are too many .*blocks_per_chunk"):
        bundle_bytes()


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
        ("priority", 101),
        ("priority", "1"),
        ("more", ""),
    ],
)
def test_a_refused_field_of_the_prompt_is_named(whole: bytes, tmp_path: Path, field: str, value: object) -> None:
    header, data = opened(whole)
    header["__metadata__"]["kvtier.prompt"][field] = value
    assert "in its header, " in (told := refusal(sealed(header, data), tmp_path))
    assert field in told
