"""Every counter of the daemon, declared here and nowhere else.

All count events since the daemon started and only grow, except those that say "now". `kvtier status` shows those that
are not zero, under their names here; /metrics shows all of them, under the names that Prometheus wants. Write
amplification is (pack_bytes_written + compacted_bytes_written) / durable_raw_bytes.
"""

from dataclasses import asdict, dataclass

from kvtier.obs.declare import counted, counter, gauged, series

_SESSIONS_ENDED = counter(
    "sessions_ended", "Sessions that ended, by how.", reason=("closed", "gone", "cut", "refused", "drained")
)
_HIT_CHUNKS = counter(
    "hit_chunks", "Chunks that engines asked for and got, by the tier they were in.", tier=("host", "disk")
)
_HIT_BYTES = counter(
    "hit_bytes",
    "Raw bytes of the chunks that engines asked for and got, by the tier they were in.",
    tier=("host", "disk"),
)
_MISSED_CHUNKS = counter(
    "missed_chunks",
    "Chunks that engines asked for and did not get in the first answer. They ask only for what they were told is held.",
    reason=("absent", "no_slot", "disk_off", "over_limit"),
)
_STORES_DISCARDED = counter("stores_discarded", "Chunks not taken in, by why.", reason=("stamp", "aborted"))
_PROMOTIONS_GIVEN_UP = counter(
    "promotions_given_up", "Promotions that did not end well, by why.", reason=("failed", "cancelled")
)
_EVICTED_CHUNKS = counter("evicted_chunks", "Chunks dropped from a tier.", tier=("host", "disk"))
_DISK_READ = counter("disk_read_bytes", "Stored bytes read from packs, by what for.", reason=("promotion", "scrub"))
_DISK_WRITTEN = counter(
    "disk_written_bytes", "Bytes of packs made durable, by what for.", reason=("spill", "compaction")
)
_PACK_WRITES_FAILED = counter(
    "pack_writes_failed", "Packs that could not be written, by what for.", reason=("spill", "compaction")
)
_DAMAGED_CHUNKS = counter(
    "damaged_chunks", "Chunks whose bytes are not what was written, by the tier.", tier=("host", "disk")
)
_LEFT_SLOTS = counter(
    "left_slots",
    "Arena rows of a dead daemon that stated a chunk, by what became of them.",
    outcome=("adopted", "doubtful"),
)
_IO_ERRORS = counter(
    "io_errors",
    "Refusals of the operating system, or of SQLite, by tier and by what was tried.",
    tier=("host", "disk", "ledger"),
    operation=("back", "release", "open", "read", "write", "fsync", "rename", "unlink", "transaction"),
)


@dataclass(slots=True)
class Counters:
    """The daemon's counters; the service adds to them on the loop thread only.

    `io_errors_disk_*` are added to by `tiers.observed_ops` alone, in any thread.
    """

    sessions_opened: int = counted("sessions_opened", "Engines that attached.")
    sessions_closed: int = series(
        _SESSIONS_ENDED, "Sessions that the engine ended in order, with a goodbye.", reason="closed"
    )
    sessions_gone: int = series(
        _SESSIONS_ENDED,
        "Sessions whose stream broke with no load or store under way: vLLM was stopped (without --shutdown-timeout it "
        "kills its engine process at once), was killed while idle, or began anew.",
        reason="gone",
    )
    sessions_cut: int = series(
        _SESSIONS_ENDED,
        "Sessions whose stream broke in the middle of a load or a store, or whose engine did not read.",
        reason="cut",
    )
    sessions_refused: int = series(_SESSIONS_ENDED, "Sessions ended for a mistake of the engine.", reason="refused")
    sessions_drained: int = series(_SESSIONS_ENDED, "Sessions ended because the daemon stops.", reason="drained")
    sessions_lost: int = counted(
        "sessions_lost", "Sessions cut or refused with a load or a store under way; idle store credits are none."
    )

    acquires: int = counted("acquires", "Acquire messages answered.")
    acquired_chunks_host: int = series(_HIT_CHUNKS, "Chunks answered as readable in host memory.", tier="host")
    acquired_chunks_disk: int = series(_HIT_CHUNKS, "Chunks answered as being promoted from disk.", tier="disk")
    acquired_bytes_host: int = series(_HIT_BYTES, "Raw bytes of the chunks answered as readable.", tier="host")
    acquired_bytes_disk: int = series(_HIT_BYTES, "Raw bytes of the chunks answered as being promoted.", tier="disk")
    missed_chunks: int = series(
        _MISSED_CHUNKS, "Chunks answered as not held, or behind one in their prefix that is not.", reason="absent"
    )
    missed_chunks_no_slot: int = series(
        _MISSED_CHUNKS, "Chunks on disk for which no arena slot could be freed.", reason="no_slot"
    )
    missed_chunks_disk_off: int = series(
        _MISSED_CHUNKS, "Chunks on disk while the disk tier is switched off.", reason="disk_off"
    )
    missed_chunks_over_limit: int = series(
        _MISSED_CHUNKS,
        "Chunks asked for by an engine that has not released as much as one may hold.",
        reason="over_limit",
    )

    stores_committed: int = counted(
        "stored_chunks", "Chunks taken into the host tier: every writer's stamp agreed with the grant."
    )
    stored_bytes: int = counted("stored_bytes", "Raw bytes of the chunks taken into the host tier.")
    stores_refused_stamp: int = series(
        _STORES_DISCARDED, "Chunks thrown away because a stamp was missing or from another grant.", reason="stamp"
    )
    stores_aborted: int = series(_STORES_DISCARDED, "Store grants that the engine gave back unused.", reason="aborted")
    store_credits_short: int = counted(
        "store_credits_short", "Times an engine wanted a slot for a store and no host slot could be freed."
    )

    chunks_promoted: int = counted("promoted_chunks", "Chunks copied from disk to host memory.")
    promoted_bytes: int = counted("promoted_bytes", "Raw bytes of the chunks copied from disk to host memory.")
    promoted_stored_bytes: int = series(_DISK_READ, "Read to promote chunks.", reason="promotion")
    promotions_failed: int = series(
        _PROMOTIONS_GIVEN_UP, "Promotions that ended as a miss: no slot, an I/O error or damage.", reason="failed"
    )
    promotions_cancelled: int = series(
        _PROMOTIONS_GIVEN_UP,
        "Promotions given up because the last request that waited for them left.",
        reason="cancelled",
    )
    promotions_rerouted: int = counted(
        "promotions_rerouted", "Reads tried again because compaction had moved the chunk meanwhile."
    )
    chunks_promoted_unasked: int = counted(
        "promoted_chunks_unasked",
        "Of the promoted, those that no request waited for: in the background, or read when the last one had left.",
    )
    host_evictions: int = series(_EVICTED_CHUNKS, "Chunks dropped from host memory to make room.", tier="host")
    disk_evictions: int = series(
        _EVICTED_CHUNKS, "Chunks dropped from disk: evicted by command, or ordinary and in the way.", tier="disk"
    )

    packs_written: int = counted("packs_written", "Packs made durable, compaction's not counted.")
    pack_bytes_written: int = series(_DISK_WRITTEN, "Packs of spilled chunks, compressed.", reason="spill")
    pack_write_ms: int = 0
    """Milliseconds that writing and recording packs took, added up; /metrics has a histogram of it instead."""
    durable_raw_bytes: int = counted(
        "spilled_bytes", "Raw bytes of the chunks made durable, before compression; compaction's not counted."
    )
    pack_fsyncs: int = counted(
        "pack_fsyncs", "Fsyncs of pack files, compaction's included; each comes with one of the directory."
    )
    spill_queue_bytes: int = gauged(
        "spill_queue_bytes", "Raw bytes that wait for, or are in, a pack being written, now."
    )
    chunks_not_spilled: int = counted(
        "spill_passed_over_chunks",
        "Times the disk did not keep up and an ordinary chunk was passed over; it is spilled later, if still there.",
    )
    packs_failed: int = series(
        _PACK_WRITES_FAILED,
        "Packs that could not be written; their chunks stay in host memory and are tried again.",
        reason="spill",
    )
    chunks_over_quota: int = counted(
        "spill_refused_chunks",
        "Times a chunk stayed off the disk because disk.bytes was used up, or the file system down to the reserve.",
    )

    packs_compacted: int = counted("packs_compacted", "Packs with holes whose chunks were moved to another pack.")
    compacted_bytes_written: int = series(
        _DISK_WRITTEN, "Packs that took over the chunks of packs with holes.", reason="compaction"
    )
    compaction_freed_bytes: int = counted("compaction_freed_bytes", "Bytes that compaction gave back to the disk.")
    compactions_failed: int = series(
        _PACK_WRITES_FAILED,
        "Compactions that the disk or the ledger refused; nothing is lost, they are tried again.",
        reason="compaction",
    )
    scrubbed_bytes: int = series(_DISK_READ, "Verified by the background scrub.", reason="scrub")
    scrub_passes: int = counted("scrub_passes", "Times the scrub came to the end of all packs.")
    disk_latched: int = counted("disk_latched", "Times the disk tier was switched off after repeated errors.")
    disk_probes: int = counted("disk_probes", "Tries to use a switched off disk tier again.")

    chunks_damaged: int = series(
        _DAMAGED_CHUNKS,
        "Chunks whose stored bytes were short or failed their checksum; each became a miss.",
        tier="disk",
    )
    host_chunks_damaged: int = series(
        _DAMAGED_CHUNKS,
        "Chunks whose bytes in host memory failed their checksum when they were to be spilled; dropped.",
        tier="host",
    )
    slots_adopted: int = series(
        _LEFT_SLOTS,
        "Arena rows of a dead daemon that were verified and are served without a disk read.",
        outcome="adopted",
    )
    slots_doubtful: int = series(
        _LEFT_SLOTS,
        "Arena rows of a dead daemon that stated a chunk and were dropped: mark, key or bytes did not agree.",
        outcome="doubtful",
    )
    packs_quarantined: int = counted(
        "packs_quarantined",
        "Packs set aside because a damaged chunk was found in them and nothing else was left in them.",
    )
    slots_quarantined: int = counted(
        "slots_quarantined", "Arena slots set aside because a lost session's process may still touch them."
    )

    io_errors_host_back: int = series(
        _IO_ERRORS,
        "Arena rows that got no memory from the file system of host.arena_dir.",
        tier="host",
        operation="back",
    )
    io_errors_host_release: int = series(
        _IO_ERRORS,
        "Arena rows whose memory the file system of host.arena_dir did not take back; they stay in use.",
        tier="host",
        operation="release",
    )
    io_errors_disk_open: int = series(
        _IO_ERRORS,
        "Pack files that could not be opened or made; one that is gone does not count.",
        tier="disk",
        operation="open",
    )
    io_errors_disk_read: int = series(_IO_ERRORS, "Reads of packs.", tier="disk", operation="read")
    io_errors_disk_write: int = series(_IO_ERRORS, "Writes of packs.", tier="disk", operation="write")
    io_errors_disk_fsync: int = series(
        _IO_ERRORS, "Fsyncs of packs and of their directory.", tier="disk", operation="fsync"
    )
    io_errors_disk_rename: int = series(
        _IO_ERRORS, "Packs that could not be given their name.", tier="disk", operation="rename"
    )
    io_errors_disk_unlink: int = series(
        _IO_ERRORS, "Packs that could not be removed; one that is gone does not count.", tier="disk", operation="unlink"
    )
    io_errors_ledger: int = series(
        _IO_ERRORS,
        "Calls that the ledger refused; nothing of a refused transaction happened.",
        tier="ledger",
        operation="transaction",
    )

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)
