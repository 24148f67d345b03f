"""What is written next, when, and what is not: the queue alone, with time as an argument. Each chunk has one byte."""

from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.layout import ChunkKey
from kvtier.tiering.write_queue import WriteQueue

LINGER_S = 10.0


def queue(*, pack_bytes: int = 4, max_bytes: int = 8) -> WriteQueue:
    return WriteQueue(pack_bytes=pack_bytes, max_bytes=max_bytes, linger_s=LINGER_S)


def keys(*numbers: int) -> list[ChunkKey]:
    return [bytes([number]) for number in numbers]


def add(q: WriteQueue, *numbers: int, pinned: bool = False, now_s: float = 0.0) -> list[bool]:
    return [q.add(key, 1, pinned=pinned, now_s=now_s) for key in keys(*numbers)]


def test_a_pack_is_full_or_of_one_kind_and_pinned_ones_go_first() -> None:
    q = queue(max_bytes=100)
    add(q, *range(6))
    add(q, 10, 11, pinned=True)
    q.pin(keys(5)[0], 0.0)
    assert [q.take_pack(0.0) for _ in range(4)] == [keys(10, 11, 5), keys(0, 1, 2, 3), keys(4), []]
    assert (q.is_empty, q.num_bytes) == (True, 8), "what is in a pack counts until it is durable"
    q.finish(keys(10, 11, 5, *range(5)))
    assert q.num_bytes == 0


def test_what_was_not_written_is_first_again() -> None:
    q = queue(max_bytes=100)
    add(q, *range(6))
    taken = q.take_pack(0.0)
    q.pin(keys(1)[0], 0.0)  # it is in a pack: nothing to move
    q.put_back(taken[1:2], [taken[0], *taken[2:]])
    assert [q.take_pack(0.0) for _ in range(3)] == [keys(1), keys(0, 2, 3, 4), keys(5)]


def test_the_oldest_of_each_kind_decides_when() -> None:
    q = queue(pack_bytes=100, max_bytes=1000)
    add(q, 0, now_s=5.0)
    add(q, 1, now_s=7.0)
    assert q.due_s() == 5.0 + 10 * LINGER_S
    add(q, 2, pinned=True, now_s=20.0)
    add(q, 3, pinned=True, now_s=25.0)
    assert q.due_s() == 20.0 + LINGER_S
    q.take_pack(30.0)
    assert q.due_s() == 5.0 + 10 * LINGER_S


def test_a_slow_disk_is_given_more_at_once_up_to_a_bound() -> None:
    q = queue(pack_bytes=100, max_bytes=1000)
    add(q, 0, pinned=True)
    dues = []
    for q.last_pack_s in (1.0, 30.0, 1000.0):
        dues.append(q.due_s())
    assert dues == [LINGER_S, 30.0, 5 * LINGER_S]


def test_what_is_a_pack_or_half_of_the_bound_is_due_at_once() -> None:
    for q, num_chunks in ((queue(pack_bytes=4, max_bytes=100), 4), (queue(pack_bytes=100, max_bytes=8), 4)):
        add(q, *range(num_chunks - 1))
        assert q.due_s() > 0.0
        add(q, 99)
        assert q.due_s() < 0.0


def test_unpinned_chunks_beyond_the_bound_are_skipped_and_taken_up_later() -> None:
    q = queue(pack_bytes=100, max_bytes=3)
    assert add(q, 0, 1, 2, 3) == [True, True, True, False]
    assert not q.is_behind
    assert add(q, 10, pinned=True) == [True], "a promise is never skipped"
    assert q.is_behind
    for key in keys(3, 4, 5):
        q.skip(key, 1, max_skipped=2)
    assert q.take_skipped() == []
    q.finish(q.take_pack(0.0))
    q.finish(q.take_pack(0.0)[:2])
    assert q.take_skipped() == keys(4, 5), "the oldest beyond the bound is forgotten"


def test_what_the_quota_refused_is_remembered_until_it_is_accepted() -> None:
    q = queue()
    for key in keys(2, 0, 1):
        q.refuse(key, 1)
    q.refuse(bytes([0]), 1)
    assert (q.num_refused, q.refused_bytes, q.refused_keys()) == (3, 3, keys(2, 0, 1))
    q.accept(keys(0, 7))
    assert (q.num_refused, q.is_refused(*keys(0)), q.is_refused(*keys(1))) == (2, False, True)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "pinned", "pin", "take", "put_back", "finish"]), st.integers(0, 15)),
        max_size=60,
    )
)
def test_every_chunk_counts_from_add_to_finish(steps: list[tuple[str, int]]) -> None:
    q, waiting, in_pack = queue(pack_bytes=3, max_bytes=6), set[ChunkKey](), list[ChunkKey]()
    for step, number in steps:
        key = bytes([number])
        if step in ("add", "pinned") and key not in waiting and key not in in_pack:
            is_taken = q.add(key, 1, pinned=step == "pinned", now_s=0.0)
            assert is_taken is (step == "pinned" or len(waiting) + len(in_pack) < 6)
            waiting |= {key} if is_taken else set()
        elif step == "pin":
            q.pin(key, 0.0)
        elif step == "take" and not in_pack:
            in_pack = q.take_pack(0.0)
            assert len(in_pack) <= 3
            assert waiting >= set(in_pack)
            waiting -= set(in_pack)
        elif step == "put_back":
            q.put_back(in_pack[::2], in_pack[1::2])
            waiting |= set(in_pack)
            in_pack = []
        elif step == "finish":
            q.finish(in_pack)
            in_pack = []
        assert q.num_bytes == len(waiting) + len(in_pack)
        assert q.is_empty is not bool(waiting)
