"""What loading costs a request, as measured, and whether computing would be faster. Pure; time is an argument.

A load takes what the engine and the workers take for any load (handing it over, one more step until it is seen to be
done), and something for each chunk. Both come from the last loads, at their best: on a busy engine the end of a load is
seen only when a long step of others is over, and computing would have waited for that step too.

Nothing is assumed before the first load, and one of so many that would be left out is made all the same: so a wrong
belief costs one slow load or a few computed chunks, not a cache that is never used again.
"""

from collections import deque

_NUM_SAMPLES = 32
_PROBE_EVERY = 16
_MIN_SAMPLES = 4


class LoadCost:
    """Seconds from `prepare_load` to the word that it is done. Scheduler thread only."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=_NUM_SAMPLES)
        self._num_left_out = 0

    def loaded(self, num_chunks: int, elapsed_s: float) -> None:
        """A load of so many chunks, at least one, took so long."""
        self._samples.append((num_chunks, elapsed_s))

    def load_s(self, num_chunks: int) -> float:
        """Forecast a load; 0 while little is known.

        The fastest load stands for the fixed part, and for its own chunks; the others say what each further chunk adds.
        Fewer chunks than any load had are taken to cost their share of it: too little, so that one is tried.
        """
        if len(self._samples) < _MIN_SAMPLES:
            return 0.0
        fastest_s, least = min((seconds, chunks) for chunks, seconds in self._samples)
        if num_chunks <= least:
            return fastest_s * (num_chunks / least)
        further = [(seconds - fastest_s) / (chunks - least) for chunks, seconds in self._samples if chunks > least]
        return fastest_s + (num_chunks - least) * min(further, default=0.0)

    def is_slower(self, num_chunks: int, compute_s: float) -> bool:
        """Return whether computing what these chunks hold would take less time than loading them.

        Args:
            num_chunks: That a load would bring.
            compute_s: Forecast of computing the same tokens.
        """
        if self.load_s(num_chunks) <= compute_s:
            return False
        self._num_left_out += 1
        return self._num_left_out % _PROBE_EVERY != 0
