"""Which chunks a prompt of a certain length has, and by what names."""

import hashlib

import pytest

from kvtier_connector.engine.chunk_keys import GroupShape, chunk_key, gpu_keys, reachable_keys

FULL = GroupShape(group_idx=0, chunk_tokens=16, hashes_per_chunk=1, window_chunks=0)
LONG = GroupShape(group_idx=1, chunk_tokens=48, hashes_per_chunk=3, window_chunks=0)
WINDOW = GroupShape(group_idx=2, chunk_tokens=32, hashes_per_chunk=2, window_chunks=2)
HASHES = [bytes([number]) * 32 for number in range(12)]


def names(group: GroupShape, *hashes: int) -> list[bytes]:
    """Return the keys of the chunks of a group that end with these block hashes."""
    return [HASHES[each] + group.group_idx.to_bytes(4, "big") for each in hashes]


def test_a_chunk_whose_hash_is_still_to_come_is_left_out() -> None:
    assert reachable_keys([FULL], HASHES[:4], 64, None).covered_tokens == 64
    found = reachable_keys([FULL], HASHES[:3], 64, None)
    assert (found.covered_tokens, len(found.keys)) == (48, 3)


@pytest.mark.parametrize(
    ("groups", "num_tokens", "covered", "keys"),
    [
        ([FULL], 15, 0, []),
        ([FULL], 16, 16, names(FULL, 0)),
        ([FULL], 47, 32, names(FULL, 0, 1)),
        ([FULL, LONG], 47, 0, []),
        ([FULL, LONG], 48, 48, names(FULL, 0, 1, 2) + names(LONG, 2)),
        ([LONG, FULL], 100, 96, names(LONG, 2, 5) + names(FULL, 0, 1, 2, 3, 4, 5)),
        ([WINDOW], 32, 0, []),
        ([WINDOW], 33, 32, names(WINDOW, 1)),
        ([WINDOW], 96, 64, names(WINDOW, 1, 3)),
        ([WINDOW], 97, 96, names(WINDOW, 3, 5)),
        ([FULL, WINDOW], 129, 128, names(FULL, *range(8)) + names(WINDOW, 5, 7)),
        ([LONG, WINDOW], 96, 0, []),
        ([LONG, WINDOW], 97, 96, names(LONG, 2, 5) + names(WINDOW, 3, 5)),
    ],
)
def test_a_prompt_is_restored_from_its_whole_chunks_and_the_last_windows(
    groups: list[GroupShape], num_tokens: int, covered: int, keys: list[bytes]
) -> None:
    found = reachable_keys(groups, HASHES, num_tokens, None)
    assert found.covered_tokens == covered
    assert list(found.keys) == keys


def test_what_vllm_caches_is_named_by_every_block_hash() -> None:
    assert gpu_keys([LONG], HASHES, 143) == tuple(each + bytes([0, 0, 0, 1]) for each in HASHES[:6])
    assert gpu_keys([LONG], HASHES, 47) == ()
    assert gpu_keys([LONG, FULL], HASHES, 96) == gpu_keys([WINDOW], HASHES, 96) == ()


def test_a_hash_of_vllms_that_names_all_is_the_key() -> None:
    offload_key = HASHES[1] + bytes([0, 0, 0, 3])
    assert chunk_key(offload_key, None) == offload_key


@pytest.mark.parametrize("num_bytes", [8, 31, 33, 64])
def test_hashes_of_other_lengths_are_hashed_to_the_length_of_a_key(num_bytes: int) -> None:
    block_hash = bytes(range(num_bytes))
    key = chunk_key(block_hash + bytes([0, 0, 0, 3]), None)
    assert key == hashlib.sha256(block_hash).digest() + bytes([0, 0, 0, 3])


def test_the_content_of_an_adapter_is_in_the_key() -> None:
    adapter = b"a" * 32
    assert chunk_key(HASHES[1] + bytes(4), adapter) == hashlib.sha256(HASHES[1] + adapter).digest() + bytes(4)
    assert FULL.key(HASHES, 1, adapter) == chunk_key(HASHES[1] + bytes(4), adapter)
    assert FULL.key(HASHES, 1, adapter) not in (FULL.key(HASHES, 1, None), FULL.key(HASHES, 1, b"b" * 32))
