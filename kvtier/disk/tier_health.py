"""When a tier that fails again and again is switched off, and when it is tried again. Time is an argument."""

from enum import Enum, auto

FAILURES_IN_A_ROW = 3
FIRST_PROBE_S = 2.0
LAST_PROBE_S = 60.0


class Latch(Enum):
    """What the tier is used for."""

    OPEN = auto()
    """Everything."""
    WRITES_OFF = auto()
    """It is full or read-only: what it holds is still read."""
    OFF = auto()
    """Nothing."""


class TierHealth:
    """Counts refusals of the operating system, not damage and not our own quota.

    Open until `FAILURES_IN_A_ROW` calls of a kind (reading, writing) failed with no success of that kind between: reads
    of a disk that refuses writes go on. A probe that succeeds opens it on probation: the next failure of the kind that
    latched it latches at once and doubles the time to the next probe, until a call of that kind has succeeded. So a
    disk that takes a small file and no pack does not flap.
    """

    def __init__(self) -> None:
        self.latch = Latch.OPEN
        self.problem = ""
        self._num_failed = {"read": 0, "write": 0}
        self._probe_after_s = FIRST_PROBE_S
        self._probe_due_s = 0.0
        self._on_probation = ""  # the kind of call that failed last time

    @property
    def readable(self) -> bool:
        """Reads may be tried."""
        return self.latch is not Latch.OFF

    @property
    def writable(self) -> bool:
        """Writes may be tried."""
        return self.latch is Latch.OPEN

    def succeeded(self, kind: str) -> None:
        """A call worked. Calls that began before the latch fell do not lift it: the probe does."""
        self._num_failed[kind] = 0
        if kind == self._on_probation and self.latch is Latch.OPEN:
            self._on_probation, self._probe_after_s = "", FIRST_PROBE_S

    def failed(self, kind: str, problem: str, now_s: float, *, full: bool = False) -> bool:
        """The system refused a call; say whether that latches the tier (or latches more of it).

        Args:
            kind: `read` or `write`.
            problem: For people.
            now_s: Monotonic seconds.
            full: The tier takes no more bytes (no space, read-only), and may well be read.
        """
        self._num_failed[kind] += 1
        on_probation = kind == self._on_probation
        if self._num_failed[kind] < FAILURES_IN_A_ROW and not on_probation:
            return False
        wanted = Latch.WRITES_OFF if full else Latch.OFF
        if self.latch is Latch.OFF or self.latch is wanted:
            return False
        self.latch, self.problem = wanted, problem
        if on_probation:
            self._probe_after_s = min(2 * self._probe_after_s, LAST_PROBE_S)
        self._on_probation = kind
        self._probe_due_s = now_s + self._probe_after_s
        return True

    def probe_in_s(self, now_s: float) -> float:
        """Return the seconds until the next probe is due."""
        return max(0.0, self._probe_due_s - now_s)

    def probe_failed(self, problem: str, now_s: float) -> None:
        """The tier does not work yet."""
        self.problem = problem
        self._probe_after_s = min(2 * self._probe_after_s, LAST_PROBE_S)
        self._probe_due_s = now_s + self._probe_after_s

    def probe_succeeded(self) -> None:
        """Use the tier again, on probation."""
        self.latch, self.problem = Latch.OPEN, ""
        self._num_failed = {"read": 0, "write": 0}
