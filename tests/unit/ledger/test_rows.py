"""How values are coded in columns."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.fingerprint import namespace_id
from kvtier.core.tokens import TokenIds
from kvtier.errors import InvalidArgumentError
from kvtier.ledger import rows
from kvtier.ledger.namespace_files import load_namespaces, save_namespace
from tests.fakes.chunks import key_of, layout_of
from tests.fakes.rows import namespace_row

quick = settings(max_examples=40, deadline=None)


@quick
@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_are_little_endian_uint32(tokens: list[int]) -> None:
    blob = rows.encode_tokens(tuple(tokens))
    assert blob == b"".join(token.to_bytes(4, "little") for token in tokens)
    assert TokenIds.from_bytes(blob) == tuple(tokens)


@pytest.mark.parametrize("tokens", [(-1,), (2**32,)])
def test_a_token_that_does_not_fit_is_refused(tokens: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="tokens"):
        rows.encode_tokens(tokens)


@pytest.mark.parametrize("num_keys", [0, 1, 5])
def test_keys_come_back_in_order(num_keys: int) -> None:
    keys = tuple(key_of(number) for number in range(num_keys))
    assert rows.decode_keys(*rows.encode_keys(keys)) == keys


def test_keys_of_different_lengths_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="one length"):
        rows.encode_keys((b"abcd", b"abc"))


@pytest.mark.parametrize(("key_bytes", "blob"), [(0, b"abc"), (2, b"abc"), (-1, b"abc")])
def test_a_blob_that_is_no_whole_number_of_keys_is_refused(key_bytes: int, blob: bytes) -> None:
    with pytest.raises(ValueError, match="no whole number"):
        rows.decode_keys(key_bytes, blob)


def test_a_layout_comes_back() -> None:
    layout = layout_of(num_ranks=4, num_writers=1)
    assert rows.decode_layout(rows.encode_layout(layout)) == layout


def test_the_copy_of_a_namespace_is_written_again_for_another_name_only(tmp_path: Path) -> None:
    """The name says whose pins it is kept for, so one that is out of date could have it deleted."""
    row = namespace_row()
    row = replace(row, namespace_id=namespace_id(row.fingerprint))
    assert save_namespace(tmp_path, row)
    assert not save_namespace(tmp_path, replace(row, seen_unix_s=row.seen_unix_s + 1))
    assert save_namespace(tmp_path, replace(row, model="another"))
    assert [each.model for each in load_namespaces(tmp_path)] == ["another"]
