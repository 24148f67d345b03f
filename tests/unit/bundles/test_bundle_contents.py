"""A front that hangs together, digest and all, and says what no export says, is refused before anything is done."""

import dataclasses
from pathlib import Path

import pytest

from kvtier.bundles.bundle import Bundle
from kvtier.bundles.bundle_format import build_front
from kvtier.errors import BundleDamagedError
from tests.fakes.bundles import a_bundle, read_bundle
from tests.fakes.chunks import layout_of

BUNDLE, DATA = a_bundle()
_FIRST = BUNDLE.chunks[0].stored
BIG = BUNDLE.chunks[0]._replace(stored=_FIRST._replace(stored_bytes=2 * _FIRST.raw_bytes + 1))


def file_of(bundle: Bundle) -> bytes:
    """Return the file with this front, and the data of the whole bundle as far as the front names it."""
    return build_front(bundle) + DATA[: bundle.data_bytes]


def test_what_an_export_writes_is_read(tmp_path: Path) -> None:
    once = read_bundle(file_of(BUNDLE), tmp_path)
    assert build_front(once) == build_front(BUNDLE)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"chunks": ()}, "at least one chunk"),
        ({"fingerprint": {}}, "kvtier.fingerprint"),
        ({"fingerprint": {str(number): "" for number in range(65)}}, "kvtier.fingerprint"),
        ({"layout": dataclasses.replace(BUNDLE.layout, groups=BUNDLE.layout.groups[1:])}, "group"),
        ({"layout": layout_of(useful_bytes=2**40)}, "rank_bytes"),
        ({"covered_tokens": 49}, "covered_tokens"),
        ({"covered_tokens": 47}, "3 of them.*KV cache group 0 has at most 2 of 47 covered tokens"),
        ({"covered_tokens": -1}, "covered_tokens"),
        ({"covered_tokens": 0}, "covered_tokens"),
        ({"chunks": (BIG, *BUNDLE.chunks[1:])}, "is too long for .* bytes of KV"),
        ({"model": "x" * 5000}, "kvtier.model"),
        ({"chunks": (BUNDLE.chunks[0], *BUNDLE.chunks)}, "each name may come once"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    changed = dataclasses.replace(BUNDLE, **changes)  # type: ignore[arg-type]
    with pytest.raises(BundleDamagedError, match=says):
        read_bundle(file_of(changed), tmp_path)


def test_a_window_has_its_last_chunks_only(tmp_path: Path) -> None:
    """What is beyond its tokens went past the quota of the prompt's owner, which goes by tokens."""
    whole, window = BUNDLE.layout.groups
    groups = (dataclasses.replace(whole, window_chunks=2), window)
    changed = dataclasses.replace(BUNDLE, layout=dataclasses.replace(BUNDLE.layout, groups=groups))
    with pytest.raises(BundleDamagedError, match="KV cache group 0 has at most 2 of 48 covered tokens"):
        read_bundle(file_of(changed), tmp_path)
    fewer = dataclasses.replace(changed, chunks=BUNDLE.chunks[:2])
    assert read_bundle(file_of(fewer), tmp_path).keys == BUNDLE.keys[:2]


def test_another_namespaces_id_is_refused(tmp_path: Path) -> None:
    data = file_of(BUNDLE).replace(BUNDLE.namespace_id.encode(), b"0" * 32)
    with pytest.raises(BundleDamagedError, match="digest differs"):
        read_bundle(data, tmp_path)
