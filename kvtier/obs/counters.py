"""Every counter of the daemon, declared here and nowhere else.

All count events since the daemon started and only grow. `kvtier status` shows those that are not zero.
"""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """The daemon's counters; the service adds to them on the loop thread only."""

    sessions_opened: int = 0
    """Engines that attached."""
    sessions_lost: int = 0
    """Sessions whose stream ended while they still held leases or store grants."""

    acquires: int = 0
    """Acquire messages answered."""
    acquired_chunks_host: int = 0
    """Chunks answered as readable in host memory."""
    acquired_chunks_disk: int = 0
    """Chunks answered as being promoted from disk."""
    missed_chunks: int = 0
    """Chunks answered as not held."""

    stores_committed: int = 0
    """Chunks taken into the host tier: every writer's stamp agreed with the grant."""
    stores_refused_stamp: int = 0
    """Chunks thrown away because a stamp was missing or from another grant."""
    stores_aborted: int = 0
    """Store grants that the engine gave back unused."""
    store_credits_short: int = 0
    """Times an engine wanted a slot for a store and no host slot could be freed."""

    chunks_promoted: int = 0
    """Chunks copied from disk to host memory."""
    promoted_bytes: int = 0
    """Raw bytes of those chunks."""
    promotions_failed: int = 0
    """Promotions that ended as a miss: no slot, an I/O error or damage."""
    host_evictions: int = 0
    """Chunks dropped from host memory to make room."""
    disk_evictions: int = 0
    """Chunks dropped from disk: evicted by command, or ordinary and in the way."""

    packs_written: int = 0
    """Packs made durable."""
    pack_bytes_written: int = 0
    """Bytes of those packs, compressed."""
    packs_failed: int = 0
    """Packs that could not be written; their chunks stay in host memory and are tried again."""
    chunks_over_quota: int = 0
    """Times a chunk stayed off the disk because disk.bytes was used up."""

    chunks_damaged: int = 0
    """Chunks whose stored bytes were short or failed their checksum; each became a miss."""
    slots_quarantined: int = 0
    """Arena slots set aside because a lost session's process may still touch them."""

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)
