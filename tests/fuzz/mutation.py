"""Inputs made of valid ones: cut, flipped, repeated, nested, with other numbers, spliced with each other."""

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from tests.fuzz.base import Target

MAX_BYTES = 4 * 1024**2
_DIGITS = re.compile(rb"-?[0-9]+")
NUMBERS = [
    *(b"0", b"-1", b"1", b"7", b"255", b"65536", b"2147483648", b"4294967296", b"9007199254740993"),
    *(b"18446744073709551615", b"99999999999999999999", b"1e999", b"-1e999", b"0.5", b"NaN", b"9" * 5000, b"null"),
]
LITTLE = [number.to_bytes(8, "little") for number in (0, 1, 2**16, 2**31, 2**32 - 1, 2**63, 2**64 - 1)]
BOMBS = [
    *(b"[" * 100_000, b'{"a":' * 50_000, b"[[" * 2000 + b"]]" * 2000, b"(" * 5000, b"- " * 3000, b"\0" * 100_000),
    *(b"\xff" * 5000, b"\xf0\x9f\x98\x80" * 1000, b'"' + b"\\ud800" * 1000, b" " * 200_000, b"\n" * 50_000),
]
HOWS = ["flip", "put", "insert", "drop", "copy", "number", "cut", "repeat", "splice", "bomb"]


class Edit(NamedTuple):
    """One change of an input; `where` is a share of its length."""

    how: str
    where: float
    size: int
    what: bytes


def edited(data: bytes, edits: Sequence[Edit]) -> bytes:
    """Return the input with these changes, one after another."""
    for edit in edits:
        at = int(edit.where * len(data))
        data = _changed(data, edit, at)[:MAX_BYTES]
    return data


def _changed(data: bytes, edit: Edit, at: int) -> bytes:
    match edit.how:
        case "flip" if data:
            at = min(at, len(data) - 1)
            return data[:at] + bytes([data[at] ^ 1 << edit.size % 8]) + data[at + 1 :]
        case "put":
            return data[:at] + edit.what + data[at + len(edit.what) :]
        case "drop":
            return data[:at] + data[at + edit.size :]
        case "copy":
            return data[:at] + data[at : at + edit.size] + data[at:]
        case "number":
            found = _DIGITS.search(data, at)
            return data[: found.start()] + edit.what + data[found.end() :] if found else data
        case "cut":
            return data[:at]
        case "repeat":
            return data[:at] + edit.what * edit.size + data[at:]
        case _:
            return data[:at] + edit.what + data[at:]


class Choices:
    """Numbers that follow from bytes: the same input makes the same message."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._more = hashlib.sha256(data).digest()

    def next(self, below: int) -> int:
        """Return a number from 0 to below - 1."""
        if self._at >= len(self._data):
            self._data, self._at = self._more, 0
            self._more = hashlib.sha256(self._more).digest()
        self._at += 1
        return self._data[self._at - 1] % below


def inputs(target: Target, seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Return inputs of a target: changed ones, half of them with right checksums, and now and then any bytes."""
    words = st.sampled_from([*target.words, *NUMBERS, *LITTLE, *BOMBS])
    plain = st.binary(max_size=16)
    splices = st.sampled_from(seeds)
    edits = st.one_of(
        st.builds(Edit, st.sampled_from(HOWS[:-2]), st.floats(0, 1), st.integers(1, 64), words | plain),
        st.builds(Edit, st.just("number"), st.floats(0, 1), st.just(1), st.sampled_from(NUMBERS)),
        st.builds(Edit, st.just("splice"), st.floats(0, 1), st.just(1), splices),
        st.builds(Edit, st.just("bomb"), st.floats(0, 1), st.just(1), st.sampled_from(BOMBS)),
    )
    changed = st.builds(edited, st.sampled_from(seeds), st.lists(edits, min_size=1, max_size=5))
    return st.one_of(changed, changed.map(target.mend), changed.map(target.mend), st.binary(max_size=200))
