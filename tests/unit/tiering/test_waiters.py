"""Who waits for a promoted chunk, and how they are notified."""

from collections.abc import Sequence

from kvtier.core.slots import SlotRef
from kvtier.tiering.promotion.waiters import Notifications, Waiter, Waiters

A, B = b"a", b"b"


class Listener:
    def __init__(self) -> None:
        self.calls: list[tuple[int, Sequence[tuple[int, SlotRef]], Sequence[int]]] = []

    def promotion_advanced(self, acquire_id: int, ready: Sequence[tuple[int, SlotRef]], failed: Sequence[int]) -> None:
        self.calls.append((acquire_id, ready, failed))


def test_each_acquire_is_notified_once_of_all_its_chunks() -> None:
    first, second, waiters, notifications = Listener(), Listener(), Waiters(), Notifications()
    for waiter, index_of_a in ((Waiter(first, 1), 0), (Waiter(first, 2), 7), (Waiter(second, 1), 3)):
        waiters.add(waiter, index_of_a, A)
    waiters.add(Waiter(first, 1), 1, B)
    assert not notifications
    notifications.ready(waiters.pop(A), SlotRef(5, 1))
    notifications.failed(waiters.pop(B))
    notifications.send()
    assert first.calls == [(1, [(0, SlotRef(5, 1))], [1]), (2, [(7, SlotRef(5, 1))], [])]
    assert second.calls == [(1, [(3, SlotRef(5, 1))], [])]
    assert not len(waiters)


def test_a_waiter_that_left_is_not_notified() -> None:
    stays, leaves, waiters, notifications = Listener(), Listener(), Waiters(), Notifications()
    waiters.add(Waiter(stays, 1), 0, A)
    waiters.add(Waiter(leaves, 1), 0, A)
    waiters.remove(Waiter(leaves, 1), A)
    waiters.remove(Waiter(leaves, 1), B)  # it did not wait for this one
    assert list(waiters.of(A)) == [Waiter(stays, 1)]
    notifications.failed(waiters.pop(A))
    notifications.send()
    assert (stays.calls, leaves.calls) == ([(1, [], [0])], [])
