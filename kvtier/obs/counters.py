"""Every counter of the daemon, declared here and nowhere else.

A counter grows from the start of the daemon on; one whose meaning says "now" is a gauge. `kvtier status` shows those
that are not zero, under the names of the fields here; /metrics shows all of them, under the names of the declarations.
Write amplification is (pack_bytes_written + compacted_bytes_written) / durable_raw_bytes.
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
    "Chunks that engines asked for and did not get in the first answer. They ask only for listed chunks.",
    reason=("absent", "no_slot", "disk_off", "over_limit"),
)
_STORES_DISCARDED = counter(
    "stores_discarded", "Chunks that the daemon did not take in, by reason.", reason=("stamp", "aborted")
)
_PROMOTIONS_GIVEN_UP = counter(
    "promotions_aborted", "Promotions that ended without their chunk, by reason.", reason=("failed", "cancelled")
)
_EVICTED_CHUNKS = counter("evicted_chunks", "Chunks dropped from a tier.", tier=("host", "disk"))
_DISK_READ = counter("disk_read_bytes", "Stored bytes read from packs, by purpose.", reason=("promotion", "scrub"))
_DISK_WRITTEN = counter(
    "disk_written_bytes", "Bytes of packs made durable, by purpose.", reason=("write_back", "compaction")
)
_PACK_WRITES_FAILED = counter(
    "pack_writes_failed", "Packs that could not be written, by purpose.", reason=("write_back", "compaction")
)
_DAMAGED_CHUNKS = counter(
    "damaged_chunks", "Chunks whose bytes are not what was written, by tier.", tier=("host", "disk")
)
_LEFT_SLOTS = counter(
    "orphan_slots",
    "Arena rows of a previous daemon that name a chunk, by outcome of their check.",
    outcome=("adopted", "rejected"),
)
_IO_ERRORS = counter(
    "io_errors",
    "Calls that the operating system or SQLite refused, by tier and operation.",
    tier=("host", "disk", "ledger"),
    operation=("populate", "release", "open", "read", "write", "fsync", "rename", "unlink", "transaction"),
)


@dataclass(slots=True)
class Counters:
    """The daemon's counters; the service adds to them on the loop thread only.

    Only the observed `FileOps` of the disk tier adds to `io_errors_disk_*`, in any thread, under its lock.
    """

    sessions_opened: int = counted("sessions_opened", "Engines that attached.")
    sessions_closed: int = series(_SESSIONS_ENDED, "Sessions that the engine closed in order.", reason="closed")
    sessions_gone: int = series(
        _SESSIONS_ENDED,
        "Sessions whose stream broke with no load or store in progress: vLLM was stopped (without --shutdown-timeout "
        "it kills its engine process at once), was killed while idle, or restarted.",
        reason="gone",
    )
    sessions_cut: int = series(
        _SESSIONS_ENDED,
        "Sessions whose stream broke during a load or a store, or whose engine did not read its messages.",
        reason="cut",
    )
    sessions_refused: int = series(
        _SESSIONS_ENDED, "Sessions that the daemon ended because the engine broke the protocol.", reason="refused"
    )
    sessions_drained: int = series(
        _SESSIONS_ENDED, "Sessions that the daemon ended because it stops.", reason="drained"
    )
    sessions_lost: int = counted(
        "sessions_lost",
        "Sessions cut or refused with a load or a store in progress; unused store credits do not count as one.",
    )

    acquires: int = counted("acquires", "Acquire messages answered.")
    acquired_chunks_host: int = series(_HIT_CHUNKS, "Chunks that were readable in host memory.", tier="host")
    acquired_chunks_disk: int = series(
        _HIT_CHUNKS, "Chunks whose promotion from disk had begun or begins.", tier="disk"
    )
    acquired_bytes_host: int = series(
        _HIT_BYTES, "Raw bytes of the chunks that were readable in host memory.", tier="host"
    )
    acquired_bytes_disk: int = series(
        _HIT_BYTES, "Raw bytes of the chunks whose promotion had begun or begins.", tier="disk"
    )
    missed_chunks: int = series(
        _MISSED_CHUNKS,
        "Chunks that the daemon does not hold, or behind one in their prefix that it does not hold.",
        reason="absent",
    )
    missed_chunks_no_slot: int = series(
        _MISSED_CHUNKS, "Chunks on disk for which no arena slot could be freed.", reason="no_slot"
    )
    missed_chunks_disk_off: int = series(
        _MISSED_CHUNKS, "Chunks on disk while the circuit breaker of the disk tier is open.", reason="disk_off"
    )
    missed_chunks_over_limit: int = series(
        _MISSED_CHUNKS,
        "Chunks that an engine asked for while it held as many as one engine may hold.",
        reason="over_limit",
    )

    stores_committed: int = counted(
        "stored_chunks", "Chunks taken into the host tier: the stamp of every writer matched the grant."
    )
    stored_bytes: int = counted("stored_bytes", "Raw bytes of the chunks taken into the host tier.")
    stores_refused_stamp: int = series(
        _STORES_DISCARDED, "Chunks dropped because a stamp was missing or belonged to another grant.", reason="stamp"
    )
    stores_aborted: int = series(_STORES_DISCARDED, "Store grants that the engine returned unused.", reason="aborted")
    store_credits_short: int = counted(
        "store_credits_short", "Times an engine requested a slot for a store and no host slot could be freed."
    )

    chunks_promoted: int = counted("promoted_chunks", "Chunks copied from disk to host memory.")
    promoted_bytes: int = counted("promoted_bytes", "Raw bytes of the chunks copied from disk to host memory.")
    promoted_stored_bytes: int = series(_DISK_READ, "Read to promote chunks.", reason="promotion")
    promotions_failed: int = series(
        _PROMOTIONS_GIVEN_UP, "Promotions that ended as a miss: no slot, an I/O error or damage.", reason="failed"
    )
    promotions_cancelled: int = series(
        _PROMOTIONS_GIVEN_UP,
        "Promotions cancelled because the last request that waited for them ended.",
        reason="cancelled",
    )
    promotions_rerouted: int = counted(
        "promotions_rerouted", "Reads repeated because compaction had moved the chunk meanwhile."
    )
    chunks_promoted_unrequested: int = counted(
        "promoted_chunks_unrequested",
        "Promoted chunks that no request waited for: prefetched, or read after the last such request had ended.",
    )
    host_evictions: int = series(_EVICTED_CHUNKS, "Chunks dropped from host memory to free capacity.", tier="host")
    disk_evictions: int = series(
        _EVICTED_CHUNKS, "Chunks dropped from disk: evicted by command, or unpinned and reclaimed.", tier="disk"
    )

    packs_written: int = counted("packs_written", "Packs made durable, without those of compaction.")
    pack_bytes_written: int = series(
        _DISK_WRITTEN, "Packs of chunks that were written back, compressed.", reason="write_back"
    )
    pack_write_ms: int = 0
    """Total milliseconds spent writing and recording packs; /metrics has a histogram instead."""
    durable_raw_bytes: int = counted(
        "written_back_bytes", "Raw bytes of the chunks made durable, before compression, without those of compaction."
    )
    pack_fsyncs: int = counted(
        "pack_fsyncs", "Fsyncs of pack files, including those of compaction; each is followed by one of the directory."
    )
    write_back_queue_bytes: int = gauged(
        "write_back_queue_bytes", "Raw bytes that wait to be written back, or are being written, now."
    )
    write_back_skipped_chunks: int = counted(
        "write_back_skipped_chunks",
        "Times an unpinned chunk was skipped because the disk was too slow; it is written back later, if still held.",
    )
    packs_failed: int = series(
        _PACK_WRITES_FAILED,
        "Packs that could not be written; their chunks stay in host memory and are written later.",
        reason="write_back",
    )
    chunks_over_quota: int = counted(
        "write_back_refused_chunks",
        "Times a chunk was not written because disk.bytes was used up, or the file system was down to the reserve.",
    )

    packs_compacted: int = counted("packs_compacted", "Packs with holes whose chunks were moved to another pack.")
    compacted_bytes_written: int = series(
        _DISK_WRITTEN, "Packs that received the chunks of packs with holes.", reason="compaction"
    )
    compaction_freed_bytes: int = counted("compaction_freed_bytes", "Bytes of disk that compaction reclaimed.")
    compactions_failed: int = series(
        _PACK_WRITES_FAILED,
        "Compactions that the disk or the ledger refused; nothing is lost, and they are repeated.",
        reason="compaction",
    )
    scrubbed_bytes: int = series(_DISK_READ, "Read to verify chunks in the background.", reason="scrub")
    scrub_passes: int = counted("scrub_passes", "Times the scrub finished all packs.")
    disk_latched: int = counted(
        "disk_breaker_opened", "Times the circuit breaker of the disk tier opened, after repeated errors."
    )
    disk_probes: int = counted("disk_probes", "Probes of the disk while the circuit breaker is open.")

    chunks_damaged: int = series(
        _DAMAGED_CHUNKS,
        "Chunks whose stored bytes were short or failed their checksum; each became a miss.",
        tier="disk",
    )
    host_chunks_damaged: int = series(
        _DAMAGED_CHUNKS,
        "Chunks whose bytes in host memory failed their checksum before write-back; dropped.",
        tier="host",
    )
    slots_adopted: int = series(
        _LEFT_SLOTS,
        "Rows that were verified; they are served without a disk read.",
        outcome="adopted",
    )
    slots_doubtful: int = series(
        _LEFT_SLOTS,
        "Rows that were dropped because mark, key or bytes did not match.",
        outcome="rejected",
    )
    packs_quarantined: int = counted(
        "packs_quarantined",
        "Packs set aside because they held a damaged chunk and nothing else.",
    )
    slots_quarantined: int = counted(
        "slots_quarantined", "Arena slots set aside because a process of a lost session may still write them."
    )

    io_errors_host_back: int = series(
        _IO_ERRORS,
        "Arena rows for which the file system of host.arena_dir had no memory.",
        tier="host",
        operation="populate",
    )
    io_errors_host_release: int = series(
        _IO_ERRORS,
        "Arena rows whose memory could not be returned to the file system of host.arena_dir; they stay in use.",
        tier="host",
        operation="release",
    )
    io_errors_disk_open: int = series(
        _IO_ERRORS,
        "Pack files that could not be opened or created; one that does not exist is not counted.",
        tier="disk",
        operation="open",
    )
    io_errors_disk_read: int = series(_IO_ERRORS, "Reads of packs.", tier="disk", operation="read")
    io_errors_disk_write: int = series(_IO_ERRORS, "Writes of packs.", tier="disk", operation="write")
    io_errors_disk_fsync: int = series(
        _IO_ERRORS, "Fsyncs of packs and of their directory.", tier="disk", operation="fsync"
    )
    io_errors_disk_rename: int = series(
        _IO_ERRORS, "Packs that could not be renamed to their final name.", tier="disk", operation="rename"
    )
    io_errors_disk_unlink: int = series(
        _IO_ERRORS,
        "Packs that could not be removed; one that does not exist is not counted.",
        tier="disk",
        operation="unlink",
    )
    io_errors_ledger: int = series(
        _IO_ERRORS,
        "Calls that SQLite refused; a refused transaction changes nothing.",
        tier="ledger",
        operation="transaction",
    )

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)
