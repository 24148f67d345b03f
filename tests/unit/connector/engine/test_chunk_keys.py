"""Which chunks a prompt of a certain length has."""

from kvtier_connector.engine.chunk_keys import GroupShape, reachable_keys

FULL = GroupShape(group_idx=0, chunk_tokens=16, hashes_per_chunk=1, window_chunks=0)
HASHES = [bytes([number]) * 32 for number in range(4)]


def test_a_chunk_whose_hash_is_still_to_come_is_left_out() -> None:
    assert reachable_keys([FULL], HASHES, 64, None).covered_tokens == 64
    found = reachable_keys([FULL], HASHES[:3], 64, None)
    assert (found.covered_tokens, len(found.keys)) == (48, 3)
