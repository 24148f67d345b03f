"""G. Einziger, R. Friedman, B. Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM ToS 13(4), 2017."""

from collections import Counter, OrderedDict

from benchmarks.eviction.peers.base import BlockCache

_WINDOW_SHARE = 0.01
_PROTECTED_SHARE = 0.8
_SAMPLE = 10
_MAX_COUNT = 15


class WTinyLfu(BlockCache):
    """A window of 1 % for new blocks, a segmented LRU, and admission by counts that are halved now and then.

    Counts are exact here; Caffeine has a sketch for them, which errs.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._window_capacity = max(1, int(capacity * _WINDOW_SHARE))
        self._main_capacity = max(0, capacity - self._window_capacity)
        self._window: OrderedDict[int, None] = OrderedDict()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._counts: Counter[int] = Counter()
        self._num_counted = 0

    def __contains__(self, block: object) -> bool:
        return block in self._window or block in self._probation or block in self._protected

    def use(self, block: int) -> None:
        """See `BlockCache`."""
        self._count(block)
        if block in self._window:
            self._window.move_to_end(block)
        elif block in self._protected:
            self._protected.move_to_end(block)
        elif block in self._probation:
            del self._probation[block]
            self._protected[block] = None
            if len(self._protected) > _PROTECTED_SHARE * self._main_capacity:
                self._probation[self._protected.popitem(last=False)[0]] = None
        else:
            self._window[block] = None
            if len(self._window) > self._window_capacity:
                self._admit(self._window.popitem(last=False)[0])

    def _admit(self, block: int) -> None:
        if len(self._probation) + len(self._protected) < self._main_capacity:
            self._probation[block] = None
        elif self._main_capacity:
            segment = self._probation or self._protected
            victim = next(iter(segment))
            if self._counts[block] > self._counts[victim]:
                del segment[victim]
                self._probation[block] = None

    def _count(self, block: int) -> None:
        self._counts[block] = min(_MAX_COUNT, self._counts[block] + 1)
        self._num_counted += 1
        if self._num_counted >= _SAMPLE * self.capacity:
            self._counts = Counter({each: count // 2 for each, count in self._counts.items() if count > 1})
            self._num_counted //= 2
