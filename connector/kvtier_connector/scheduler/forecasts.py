"""Forecasts of computing, loading and promoting, and which of them is worth it. Pure; time is an argument."""

from collections import deque

from kvtier.core.averages import smoothed

UNMEASURED_TOKENS_PER_S = 100.0
"""Assumed before the first prefill: very slow, because guessing too fast costs a whole prefill and guessing too slow a
part of one promotion, once: the first prompt after a restart waits for its chunks from disk, on a busy machine too."""

EARLY_S = 0.1
"""How long a load may hold vLLM's blocks before its last chunk is there."""
EARLY_BYTES = 32 * 1024**2
"""The same of a promotion whose rate is unknown: what a slow disk reads before the workers stop waiting."""


class PrefillRate:
    """Tokens per second of this engine's steps that are mostly prefill, as a moving average.

    Steps end in the order they began; under asynchronous scheduling the next begins before the last ends.

    Args:
        fixed_tokens_per_s: Taken instead of what is measured.
    """

    def __init__(self, fixed_tokens_per_s: float | None = None) -> None:
        self._fixed_tokens_per_s = fixed_tokens_per_s
        self._open: deque[tuple[float, int]] = deque(maxlen=8)  # bounded: an end may not come
        self._last_end_s = 0.0
        self._tokens_per_s: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """What is configured, or the average; None before the first measurement."""
        return self._tokens_per_s if self._fixed_tokens_per_s is None else self._fixed_tokens_per_s

    def step_began(self, num_tokens: int, now_s: float) -> None:
        """A step over this many tokens was scheduled."""
        self._open.append((now_s, num_tokens))

    def step_ended(self, now_s: float) -> tuple[float, int] | None:
        """The oldest open step is done: return when it began, and its tokens; None when none is open."""
        if not self._open:
            return None
        began_s, num_tokens = self._open.popleft()
        elapsed_s = now_s - max(began_s, self._last_end_s)
        self._last_end_s = now_s
        if num_tokens >= 64 and elapsed_s > 0:  # fewer are mostly decoding
            rate = num_tokens / elapsed_s
            self._tokens_per_s = rate if self._tokens_per_s is None else smoothed(self._tokens_per_s, rate)
        return began_s, num_tokens

    def prefill_s(self, num_tokens: int) -> float:
        """Forecast how long computing these tokens would take."""
        return num_tokens / (self.tokens_per_s or UNMEASURED_TOKENS_PER_S)


class LoadCost:
    """Seconds from `prepare_load` until the load is reported done. Scheduler thread only.

    A load takes what the engine and the workers take for any load (handing it over, one more step until it is seen to
    be done), and something for each chunk. Both come from the last loads, at their best: on a busy engine the end of a
    load is seen only when a long step of others is over, and computing would have waited for that step too.

    Nothing is assumed before the first load, and one in 16 loads that would be skipped is made all the
    same: so a wrong belief costs one slow load or a few computed chunks, not a cache that is never used again.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=32)
        self._num_skipped = 0

    def loaded(self, num_chunks: int, elapsed_s: float) -> None:
        """A load of `num_chunks` chunks, at least one, took `elapsed_s`."""
        self._samples.append((num_chunks, elapsed_s))

    def load_s(self, num_chunks: int) -> float:
        """Forecast a load; 0 while little is known.

        The fastest load gives the fixed part and its own chunks; the others show what each further chunk adds.
        Fewer chunks than any load had are taken to cost their share of it: too little, so that one is tried.
        """
        if len(self._samples) < 4:
            return 0.0
        fastest_s, least = min((seconds, chunks) for chunks, seconds in self._samples)
        if num_chunks <= least:
            return fastest_s * (num_chunks / least)
        further = [(seconds - fastest_s) / (chunks - least) for chunks, seconds in self._samples if chunks > least]
        return fastest_s + (num_chunks - least) * min(further, default=0.0)

    def is_slower(self, num_chunks: int, compute_s: float) -> bool:
        """Return whether computing what these chunks hold, in `compute_s`, would take less time than loading them."""
        if self.load_s(num_chunks) <= compute_s:
            return False
        self._num_skipped += 1
        return self._num_skipped % 16 != 0


def is_near(forecast_s: float | None, pending_bytes: int, now_s: float) -> bool:
    """Return whether a promotion is forecast to end so soon that its load may begin: it holds vLLM's blocks until then.

    Without a forecast the daemon has promoted nothing yet: then a short promotion counts as near.
    """
    return pending_bytes <= EARLY_BYTES if forecast_s is None else forecast_s - now_s <= EARLY_S


def worth_waiting(forecast_s: float | None, now_s: float, deadline_s: float) -> bool:
    """Return whether the promotion is forecast to end before recomputing would.

    Args:
        forecast_s: When it ends; None while unknown, which counts as early enough. One that has passed does not end
            the wait: the promotion is late, and may still come before the deadline.
        now_s: Now.
        deadline_s: When recomputing, begun at the first answer, would have ended.
    """
    return now_s < deadline_s and (forecast_s is None or forecast_s <= deadline_s)
