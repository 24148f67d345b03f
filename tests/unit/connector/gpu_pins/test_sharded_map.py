"""A map of many entries is like a dictionary, and is emptied in pieces."""

from kvtier_connector.gpu_pins.sharded_map import ShardedMap

KEYS = [bytes([number // 250, number % 250]) * 18 for number in range(5000)]


def map_of(keys: list[bytes]) -> ShardedMap[int]:
    entries: ShardedMap[int] = ShardedMap()
    for number, key in enumerate(keys):
        assert entries.add(key, number)
    return entries


def test_it_holds_each_key_once() -> None:
    entries = map_of(KEYS)
    assert not entries.add(KEYS[7], -1)
    assert len(entries) == 5000
    assert KEYS[7] in entries
    assert [entries.get(KEYS[7]), entries.get(KEYS[8]), entries.get(b"new"), entries.get(b"new", 3)] == [7, 8, None, 3]
    assert [entries.pop(KEYS[7]), entries.pop(KEYS[7])] == [7, None]
    assert KEYS[7] not in entries
    assert len(entries) == 4999


def test_new_maps_share_nothing() -> None:
    one, other = ShardedMap[int](), ShardedMap[int]()
    assert one.add(KEYS[0], 1)
    assert [len(other), other.get(KEYS[0]), KEYS[0] in other] == [0, None, False]
    assert sum(key in one for key in KEYS) == 1  # an entry is not in the shards that are still empty


def test_a_drain_takes_all_out_a_few_at_a_time() -> None:
    entries, drained = map_of(KEYS), []
    while entries:
        num_before = len(entries)
        drained += entries.drain(100)
        assert 100 <= num_before - len(entries) <= 200 or not entries
    assert sorted(drained) == sorted((key, number) for number, key in enumerate(KEYS))
    assert entries.drain(100) == []
