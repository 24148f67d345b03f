"""What the CUDA worker needs from a device, as narrow as possible: real in `cuda_device.py`, fake in tests."""

from typing import Protocol

from kvtier.errors import KvtierError
from kvtier_connector.workers.copy_list import CopyList


class PageLockError(KvtierError):
    """The driver does not lock, or unlock, pages of host memory."""


class Ticket(Protocol):
    """Copies under way. One thread asks."""

    def is_done(self) -> bool:
        """Return whether the last byte has moved. Raises what the device reports."""

    def wait(self) -> None:
        """Wait for that. Raises what the device reports."""

    def seconds(self) -> float:
        """Return how long the device took; only once it is done."""


class Copies(Protocol):
    """Copies between device and host memory, in order of submission for each direction."""

    def begin(self, copies: CopyList, *, is_load: bool) -> Ticket:
        """Begin to copy, after what the calling thread has given the device to do so far.

        Raises what the device reports; then none of the copies is under way.
        """


class HostMemory(Protocol):
    """Page-locks host memory, so that the device copies at the bus's speed and without the CPU."""

    def enter_thread(self) -> None:
        """Call first in each thread that locks or unlocks."""

    def lock(self, address: int, num_bytes: int) -> None:
        """Lock whole pages.

        Raises:
            PageLockError: The driver refuses; the message has its reason.
        """

    def unlock(self, address: int) -> None:
        """Undo `lock` of the same address.

        Raises:
            PageLockError: The driver refuses.
        """
