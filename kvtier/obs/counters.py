"""Every counter of the daemon, declared here and nowhere else.

All count events since the daemon started and only grow, except those that say "now". `kvtier status` shows those that
are not zero. Write amplification is (pack_bytes_written + compacted_bytes_written) / durable_raw_bytes.
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
    promotions_cancelled: int = 0
    """Promotions given up because the last request that waited for them left."""
    promotions_rerouted: int = 0
    """Reads tried again because compaction had moved the chunk meanwhile."""
    chunks_promoted_unasked: int = 0
    """Of the promoted, those that no request waited for: in the background, or read when the last one had left."""
    host_evictions: int = 0
    """Chunks dropped from host memory to make room."""
    disk_evictions: int = 0
    """Chunks dropped from disk: evicted by command, or ordinary and in the way."""

    packs_written: int = 0
    """Packs made durable."""
    pack_bytes_written: int = 0
    """Bytes of those packs, compressed."""
    pack_write_ms: int = 0
    """Milliseconds that writing and recording those packs took, added up."""
    durable_raw_bytes: int = 0
    """Bytes of the chunks in those packs, before compression."""
    pack_fsyncs: int = 0
    """Fsyncs of pack files, compaction's included; each comes with one of the directory."""
    spill_queue_bytes: int = 0
    """Raw bytes that wait for, or are in, a pack being written, now."""
    chunks_not_spilled: int = 0
    """Times an ordinary chunk was passed over because the disk did not keep up; it is spilled later, if still there."""
    packs_failed: int = 0
    """Packs that could not be written; their chunks stay in host memory and are tried again."""
    chunks_over_quota: int = 0
    """Times a chunk stayed off the disk because disk.bytes was used up."""

    packs_compacted: int = 0
    """Packs with holes whose chunks were moved to another pack."""
    compacted_bytes_written: int = 0
    """Bytes of the packs written for that."""
    compaction_freed_bytes: int = 0
    """Bytes that it gave back to the disk."""
    compactions_failed: int = 0
    """Compactions that the disk or the ledger refused; nothing is lost, they are tried again."""
    scrubbed_bytes: int = 0
    """Stored bytes that the background scrub verified."""
    scrub_passes: int = 0
    """Times it came to the end of all packs."""
    disk_latched: int = 0
    """Times the disk tier was switched off after repeated errors."""
    disk_probes: int = 0
    """Tries to use it again."""

    chunks_damaged: int = 0
    """Chunks whose stored bytes were short or failed their checksum; each became a miss."""
    slots_adopted: int = 0
    """Arena rows of a dead daemon that were verified and are served without a disk read."""
    slots_doubtful: int = 0
    """Arena rows of a dead daemon that stated a chunk and were dropped: mark, key or bytes did not agree."""
    packs_quarantined: int = 0
    """Packs set aside because a damaged chunk was found in them and nothing else was left in them."""
    slots_quarantined: int = 0
    """Arena slots set aside because a lost session's process may still touch them."""

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)
