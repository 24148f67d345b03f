"""Token ids in four bytes each."""

import hashlib
import struct
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.tokens import TokenIds, common_prefix

ids = st.lists(st.integers(0, 2**32 - 1), max_size=20)


@given(ids)
def test_they_are_the_sequence_that_was_given(given_ids: list[int]) -> None:
    tokens = TokenIds(given_ids)
    assert tokens == tuple(given_ids) == tuple(tokens)
    assert tokens == TokenIds(tuple(given_ids))
    assert hash(tokens) == hash(TokenIds(given_ids))
    assert (len(tokens), tokens.to_list(), list(tokens[1:3])) == (len(given_ids), given_ids, given_ids[1:3])
    assert all(tokens[index] == token for index, token in enumerate(given_ids))
    assert tokens != [*given_ids, 1]


@given(ids)
def test_bytes_come_back_as_the_same_ids(given_ids: list[int]) -> None:
    data = TokenIds(given_ids).to_bytes()
    assert data == struct.pack(f"<{len(given_ids)}I", *given_ids)
    assert TokenIds.from_bytes(data) == given_ids


@given(ids)
def test_the_digest_is_that_of_the_ids(given_ids: list[int]) -> None:
    tokens = TokenIds(given_ids)
    expected = hashlib.sha256(struct.pack(f"<{len(given_ids)}I", *given_ids)).hexdigest()[:12]
    assert tokens.digest == (expected if given_ids else "")
    assert tokens.digest is tokens.digest, "computed once: lists ask for it"


def test_an_id_takes_four_bytes() -> None:
    tokens = TokenIds(range(100_000, 110_000))
    assert tokens.num_bytes == 40_000
    assert sys.getsizeof(tokens._ids) < 45_000


def test_an_array_is_taken_over() -> None:
    given_ids = array("I", [1, 2])
    assert TokenIds(given_ids)._ids is given_ids
    assert TokenIds(array("q", [1, 2])) == [1, 2]


@pytest.mark.parametrize("token", [-1, 2**32])
def test_an_id_has_32_bits(token: int) -> None:
    with pytest.raises(OverflowError):
        TokenIds([token])


def test_other_things_are_not_equal() -> None:
    assert TokenIds([1]) != 1
    with pytest.raises(ValueError, match="multiple"):
        TokenIds.from_bytes(b"abc")


@given(ids, ids)
def test_ids_begin_with_each_of_their_prefixes_and_with_nothing_else(given_ids: list[int], more: list[int]) -> None:
    tokens = TokenIds(given_ids)
    for end in range(len(given_ids) + 1):
        assert tokens.begins_with(TokenIds(given_ids[:end]))
    longer = TokenIds(given_ids + more)
    assert tokens.begins_with(longer) is (not more)
    assert tokens.begins_with(TokenIds(more)) is (given_ids[: len(more)] == more)


def test_ids_are_equal_to_sequences_of_the_same_ids_alone() -> None:
    tokens = TokenIds([1, 2])
    for same in (tokens, TokenIds([1, 2]), [1, 2], (1, 2), range(1, 3)):
        assert tokens == same
    for other in (TokenIds([1, 3]), TokenIds([1]), TokenIds(), [1], [1, 2, 3], [2, 1], (0, 2), [], {1, 2}, None):
        assert tokens != other
    assert TokenIds() == []


def test_a_slice_is_of_the_same_kind() -> None:
    tokens = TokenIds(range(10))
    assert isinstance(tokens[2:4], TokenIds)
    assert (tokens[2:4].num_bytes, tokens[-1], tokens[::3].to_list()) == (8, 9, [0, 3, 6, 9])
    assert TokenIds([7]).to_bytes() == b"\x07\0\0\0"


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 48, 500, 5000])
def test_equal_ids_are_counted_to_the_first_that_differs(length: int) -> None:
    """Compared in parts that grow, an id may differ in each of its bytes."""
    ids = [*range(70_000, 70_000 + length)]
    for changed in (1, 256, 65_536, 2**31):
        one, other = TokenIds([*ids, 5, 6]), TokenIds([*ids, 5 ^ changed, 6, 7])
        assert one.num_shared(other) == other.num_shared(one) == length
    assert TokenIds(ids).num_shared(TokenIds([*ids, 9])) == length


def test_the_common_prefix_is_what_all_begin_with() -> None:
    assert common_prefix([[1, 2, 3], [1, 2], [1, 2, 4]]) == [1, 2]
    assert common_prefix([[1], []]) == []
    assert common_prefix([]) == []
