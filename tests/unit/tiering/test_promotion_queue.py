"""Turns of the promotion queue; a chunk's length here is its last byte."""

from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiering.promotion.queue import PromotionQueue


def queue() -> PromotionQueue[str]:
    return PromotionQueue(lambda key: key[-1])


def keys(*lengths: int, mark: int = 0) -> list[bytes]:
    return [bytes([mark, number, length]) for number, length in enumerate(lengths)]


def test_waiters_take_turns_in_prefix_order() -> None:
    q = queue()
    long, short = keys(1, 1, 1, 1, 1, mark=1), keys(1, 1, mark=2)
    q.add("long", long)
    q.add("short", short)
    assert [q.take(2) for _ in range(5)] == [long[:2], short, long[2:4], long[4:], []]


def test_a_shared_chunk_is_taken_once_in_the_turn_that_comes_first() -> None:
    q = queue()
    shared = keys(1, 1, 1, 1)
    q.add("a", shared)
    q.add("b", shared[2:])
    assert q.take(2) == shared[:2]
    assert q.take(2) == shared[2:]
    assert (q.take(2), len(q), q.num_bytes) == ([], 0, 0)


def test_who_left_is_not_served_and_others_are() -> None:
    q = queue()
    shared = keys(1, 1)
    q.add("a", shared)
    q.add("b", shared[1:])
    for key in shared:
        q.remove("a", key)
    assert len(q) == 1
    assert q.take(9) == shared[1:]


def test_what_is_put_back_comes_first() -> None:
    q = queue()
    wanted = keys(1, 1, 1, 1)
    q.add("a", wanted)
    taken = q.take(2)
    assert all(q.put_back(key) for key in reversed(taken))
    assert q.take(9) == wanted


def test_bytes_until_done_count_the_turns_of_others() -> None:
    q = queue()
    q.add("long", keys(*[10] * 5, mark=1))
    q.add("short", keys(10, mark=2))
    assert q.bytes_until_done("short") == 20
    assert q.bytes_until_done("long") == 60
    assert q.bytes_until_done("no waiter") == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["ask", "take", "leave", "discard"]), st.integers(0, 2), st.integers(0, 5)),
        max_size=40,
    )
)
def test_every_chunk_is_taken_as_often_as_somebody_waits_for_it(steps: list[tuple[str, int, int]]) -> None:
    q, waiting = queue(), dict[bytes, set[str]]()
    everything = keys(1, 2, 3, 4, 5, 6)
    for step, who, which in steps:
        waiter, key = f"waiter-{who}", everything[which]
        if step == "ask":
            q.add(waiter, [key])
            waiting.setdefault(key, set()).add(waiter)
        elif step == "leave":
            q.remove(waiter, key)
            waiting.get(key, set()).discard(waiter)
        elif step == "discard":
            q.pop(key)
            waiting.pop(key, None)
        else:
            for taken in q.take(5):
                assert set(q.pop(taken)) == waiting.pop(taken)
        waiting = {key: waiters for key, waiters in waiting.items() if waiters}
        assert len(q) == len(waiting)
        assert q.num_bytes == sum(key[-1] for key in waiting)
    while batch := q.take(5):
        for taken in batch:
            assert set(q.pop(taken)) == waiting.pop(taken)
    assert not waiting


def test_the_head_is_what_take_begins_with() -> None:
    q, wanted = queue(), keys(1, 1, 1, 1, 1, 1)
    assert q.head() is None
    q.add("a", wanted[:4])
    q.add("b", wanted[2:6])
    assert q.head() == wanted[0]
    q.pop(wanted[0])
    q.remove("a", wanted[1])
    assert q.head() == wanted[2], "what no waiter waits for any longer is skipped"
    assert q.take(1) == [wanted[2]]
    assert q.head() == wanted[3], "now it is the other's turn"
    assert q.take(9) == wanted[3:6]
    assert q.head() is None


def test_taking_ends_before_what_is_not_wanted_now() -> None:
    q, wanted = queue(), keys(1, 1, 1, 1, 1, 1)
    q.add("a", wanted[:6])
    assert q.take(9, until=wanted[2:].__contains__) == wanted[:2]
    assert q.take(9, until=wanted[2:].__contains__) == wanted[2:3], "the first is always taken"
    assert q.take(9) == wanted[3:6]
