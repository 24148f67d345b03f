"""A header that hangs together, digest and all, and says what no export says, is refused before anything is done."""

import dataclasses
from pathlib import Path

import pytest

from kvtier.bundles.bundle_format import Bundle, build_header
from kvtier.errors import BundleDamagedError
from tests.fakes.bundles import bundle_bytes, read_bundle
from tests.fakes.chunks import key_of


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return read_bundle(bundle_bytes(), tmp_path)


def file_of(bundle: Bundle) -> bytes:
    """Return the file with this header, and the data of the whole bundle as far as the header names it."""
    whole = bundle_bytes()
    data = whole[4096:]
    return build_header(bundle) + data[: bundle.data_bytes]


def test_what_an_export_writes_is_read(bundle: Bundle, tmp_path: Path) -> None:
    assert read_bundle(file_of(bundle), tmp_path) == bundle


@pytest.mark.parametrize(
    "changes",
    [
        lambda whole: {"keys": whole.keys[:2]},
        lambda whole: {"keys": (*whole.keys, key_of(9))},
        lambda whole: {"keys": (*whole.keys[:2], key_of(9))},
        lambda whole: {"keys": (), "chunks": ()},
        lambda whole: {"keys": ()},
        lambda whole: {"chunks": whole.chunks[:2]},
    ],
    ids=["a key less", "a key more", "another key", "nothing", "no keys", "a chunk less"],
)
def test_keys_that_are_not_those_of_the_chunks_are_refused(bundle: Bundle, tmp_path: Path, changes: object) -> None:
    changed = dataclasses.replace(bundle, **changes(bundle))  # type: ignore[operator]
    with pytest.raises(BundleDamagedError):
        read_bundle(file_of(changed), tmp_path)
