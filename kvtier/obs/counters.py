"""Every counter of the daemon, declared here and nowhere else.

A counter grows from the start of the daemon on; one whose meaning says "now" is a gauge. A field has the name of its
metric, without `kvtier_` and `_total`, and behind it the values of its labels: `missed_chunks_no_slot` is
`kvtier_missed_chunks_total{reason="no_slot"}`. `kvtier status` shows those that are not zero, /metrics all of them.
Write amplification is (disk_written_bytes_write_back + disk_written_bytes_compaction) / written_back_bytes.
"""

from dataclasses import asdict, dataclass

from kvtier.core.requests.request_outcomes import MEANINGS, RequestOutcome
from kvtier.obs.declare import counted, counter, gauged, series

_TIERS = ("host", "disk")
_WRITERS = ("write_back", "compaction")

_SESSIONS_ENDED = counter(
    "sessions_ended", "Sessions that ended, by how.", reason=("closed", "gone", "cut", "refused", "drained")
)
_HIT_CHUNKS = counter("hit_chunks", "Chunks that engines asked for and got, by the tier they were in.", tier=_TIERS)
_HIT_BYTES = counter("hit_bytes", "Raw bytes of the chunks that `hit_chunks` counts.", tier=_TIERS)
_MISSED_CHUNKS = counter(
    "missed_chunks",
    "Chunks that engines asked for and did not get in the first answer. They ask only for listed chunks.",
    reason=("absent", "no_slot", "disk_off", "over_limit", "quarantined"),
)
_STORES_DISCARDED = counter(
    "stores_discarded",
    "Chunks that the daemon refused to store, by reason.",
    reason=("stamp", "quarantined", "aborted"),
)
_PROMOTIONS_ABORTED = counter(
    "promotions_aborted", "Promotions that ended without their chunk, by reason.", reason=("failed", "cancelled")
)
_EVICTED_CHUNKS = counter("evicted_chunks", "Chunks dropped from a tier.", tier=_TIERS)
_DISK_READ = counter("disk_read_bytes", "Stored bytes read from packs, by purpose.", reason=("promotion", "scrub"))
_DISK_WRITTEN = counter(
    "disk_written_bytes",
    "Bytes of packs made durable, by purpose. Those of imports and repairs are not counted.",
    reason=_WRITERS,
)
_PACK_WRITES_FAILED = counter("pack_writes_failed", "Packs that could not be written, by purpose.", reason=_WRITERS)
_DAMAGED_CHUNKS = counter("damaged_chunks", "Chunks whose bytes are not what was written, by tier.", tier=_TIERS)
_ORPHAN_SLOTS = counter(
    "orphan_slots",
    "Arena rows of a previous daemon that name a chunk, by outcome of their check.",
    outcome=("recovered", "rejected"),
)
_REQUEST_PINS = counter(
    "request_pins", "Prefixes that requests asked to pin, by outcome.", result=("made", "extended", "refused")
)
_REQUESTS = counter(
    "requests",
    "Requests of users that vLLM has begun to compute, as engines report them when they end, by outcome: why each was, "
    "or was not, restored what kvtier has. Warm requests are not counted.",
    outcome=tuple(RequestOutcome),
)
_PROMPT_TOKENS = counter(
    "prompt_tokens",
    "Tokens of the prompts of these requests, by where they came from.",
    source=("device", "host", "disk", "computed"),
)
_IO_ERRORS = counter(
    "io_errors",
    "Calls that the operating system or SQLite refused, by tier and operation. To open or unlink a pack that does not "
    "exist is not counted; a refused transaction changes nothing.",
    tier=(*_TIERS, "ledger"),
    operation=("populate", "release", "open", "read", "write", "fsync", "rename", "unlink", "transaction"),
)

_REMOTE_REQUESTS = counter(
    "remote_requests",
    "Requests to the store that hosts share, by operation; a list is one for each thousand objects.",
    operation=("read", "write", "list", "delete"),
)
_REMOTE_BYTES = counter("remote_transferred_bytes", "Bytes to and from that store.", direction=("up", "down"))

_POOL_BYTES = counter("remote_pool_transferred_bytes", "Bytes to and from that pool.", direction=("up", "down"))


_CALLS_REFUSED = counter(
    "calls_refused",
    "Calls of operators that were refused before they began, by reason.",
    reason=("unauthenticated", "forbidden", "too_many", "silent"),
)
_AUDIT_LINES = counter("audit_lines", "Lines of the audit log.", result=("written", "lost"))


def _outcome(outcome: RequestOutcome) -> int:
    return series(_REQUESTS, outcome.value, meaning=MEANINGS[outcome])


@dataclass(slots=True)
class Counters:
    """The daemon's counters; the service adds to them on the loop thread only.

    Only the observed `FileOps` of the disk tier adds to `io_errors_disk_*`, in any thread, under its lock.
    """

    sessions_opened: int = counted("sessions_opened", "Engines that attached.")
    sessions_ended_closed: int = series(_SESSIONS_ENDED, "closed", meaning="The engine closed it in order.")
    sessions_ended_gone: int = series(
        _SESSIONS_ENDED,
        "gone",
        meaning="The stream broke with no load or store in progress: vLLM was stopped (without --shutdown-timeout it "
        "kills its engine process at once), was killed while idle, or restarted.",
    )
    sessions_ended_cut: int = series(
        _SESSIONS_ENDED,
        "cut",
        meaning="The stream broke during a load or a store, or the engine did not read its messages.",
    )
    sessions_ended_refused: int = series(_SESSIONS_ENDED, "refused", meaning="The engine broke the protocol.")
    sessions_ended_drained: int = series(_SESSIONS_ENDED, "drained", meaning="The daemon stopped.")
    sessions_lost: int = counted(
        "sessions_lost",
        "Sessions cut or refused with a load or a store in progress; unused store credits do not count as one.",
    )

    acquires: int = counted("acquires", "Acquire messages answered.")
    hit_chunks_host: int = series(_HIT_CHUNKS, "host", meaning="They were readable.")
    hit_chunks_disk: int = series(_HIT_CHUNKS, "disk", meaning="Their promotion had begun or began.")
    hit_bytes_host: int = series(_HIT_BYTES, "host")
    hit_bytes_disk: int = series(_HIT_BYTES, "disk")
    missed_chunks_absent: int = series(
        _MISSED_CHUNKS, "absent", meaning="The daemon does not hold them, or not one before them in their prefix."
    )
    missed_chunks_no_slot: int = series(
        _MISSED_CHUNKS, "no_slot", meaning="They are on disk, and no arena slot could be freed."
    )
    missed_chunks_disk_off: int = series(
        _MISSED_CHUNKS, "disk_off", meaning="They are on disk while the circuit breaker of the disk tier is open."
    )
    missed_chunks_over_limit: int = series(
        _MISSED_CHUNKS, "over_limit", meaning="The engine held as many chunks as one engine may hold."
    )
    missed_chunks_quarantined: int = series(
        _MISSED_CHUNKS, "quarantined", meaning="The namespace is quarantined: an operator has stopped it."
    )

    stored_chunks: int = counted(
        "stored_chunks", "Chunks taken into the host tier: the stamp of every writer matched the grant."
    )
    stored_bytes: int = counted("stored_bytes", "Raw bytes of the chunks taken into the host tier.")
    stores_discarded_stamp: int = series(
        _STORES_DISCARDED, "stamp", meaning="A stamp was missing or belonged to another grant."
    )
    stores_discarded_quarantined: int = series(
        _STORES_DISCARDED, "quarantined", meaning="The namespace is quarantined: an operator has stopped it."
    )
    stores_discarded_aborted: int = series(
        _STORES_DISCARDED, "aborted", meaning="The engine returned the grant unused."
    )
    store_credits_short: int = counted(
        "store_credits_short", "Times an engine requested a slot for a store and no host slot could be freed."
    )

    remote_restored_chunks: int = counted(
        "remote_restored_chunks", "Chunks brought from the store of the fleet into host memory."
    )
    remote_restored_bytes: int = counted("remote_restored_bytes", "Raw bytes of these chunks.")
    remote_damaged_objects: int = counted(
        "remote_damaged_objects", "Times an object in the store was read twice and was not what was written."
    )
    remote_damaged_chunks: int = counted("remote_damaged_chunks", "Chunks of these objects that were found wrong.")
    remote_uploaded_prompts: int = counted("remote_uploaded_prompts", "Prompts whose KV went to the store.")
    remote_uploaded_bytes: int = counted("remote_uploaded_bytes", "Bytes of these bundles.")

    remote_requests_read: int = series(_REMOTE_REQUESTS, "read")
    remote_requests_write: int = series(_REMOTE_REQUESTS, "write")
    remote_requests_list: int = series(_REMOTE_REQUESTS, "list")
    remote_requests_delete: int = series(_REMOTE_REQUESTS, "delete")
    remote_requests_failed: int = counted(
        "remote_requests_failed", "Requests to the store that failed, after its client had tried again."
    )
    remote_transferred_bytes_up: int = series(_REMOTE_BYTES, "up")
    remote_transferred_bytes_down: int = series(_REMOTE_BYTES, "down")

    remote_pool_hits: int = counted("remote_pool_hits", "Ranges of KV that came from the pool in front of the store.")
    remote_pool_misses: int = counted("remote_pool_misses", "Ranges that the pool had not; the store was asked.")
    remote_pool_damaged: int = counted("remote_pool_damaged", "Pieces in the pool that were not what was written.")
    remote_pool_failures: int = counted(
        "remote_pool_failures", "Calls that the pool refused or did not answer; it is left alone for 30 s after each."
    )
    remote_pool_transferred_bytes_up: int = series(_POOL_BYTES, "up")
    remote_pool_transferred_bytes_down: int = series(_POOL_BYTES, "down")

    promoted_chunks: int = counted("promoted_chunks", "Chunks copied from disk to host memory.")
    promoted_bytes: int = counted("promoted_bytes", "Raw bytes of the chunks copied from disk to host memory.")
    disk_read_bytes_promotion: int = series(_DISK_READ, "promotion", meaning="To promote chunks.")
    promotions_aborted_failed: int = series(
        _PROMOTIONS_ABORTED, "failed", meaning="No slot, an I/O error or damage: a miss."
    )
    promotions_aborted_cancelled: int = series(
        _PROMOTIONS_ABORTED, "cancelled", meaning="The last request that waited for it ended."
    )
    promotions_rerouted: int = counted(
        "promotions_rerouted", "Reads repeated because compaction had moved the chunk meanwhile."
    )
    promoted_chunks_unrequested: int = counted(
        "promoted_chunks_unrequested",
        "Promoted chunks that no request waited for: prefetched, or read after the last such request had ended.",
    )
    evicted_chunks_host: int = series(_EVICTED_CHUNKS, "host", meaning="To free host memory.")
    evicted_chunks_disk: int = series(_EVICTED_CHUNKS, "disk", meaning="By command, or unpinned and reclaimed.")

    packs_written: int = counted(
        "packs_written", "Packs that write-back made durable: without those of compaction, imports and repairs."
    )
    disk_written_bytes_write_back: int = series(
        _DISK_WRITTEN, "write_back", meaning="Packs of chunks that were written back, compressed."
    )
    pack_write_ms: int = 0
    """Total milliseconds spent writing and recording packs; /metrics has a histogram instead."""
    written_back_bytes: int = counted(
        "written_back_bytes", "Raw bytes of the chunks in packs_written, before compression."
    )
    pack_fsyncs: int = counted(
        "pack_fsyncs", "Fsyncs of pack files, of write-back and compaction; each is followed by one of the directory."
    )
    write_back_queue_bytes: int = gauged(
        "write_back_queue_bytes", "Raw bytes that wait to be written back, or are being written, now."
    )
    write_back_skipped_chunks: int = counted(
        "write_back_skipped_chunks",
        "Times an unpinned chunk was skipped because the disk was too slow; it is written back later, if still held.",
    )
    pack_writes_failed_write_back: int = series(
        _PACK_WRITES_FAILED, "write_back", meaning="The chunks stay in host memory and are written later."
    )
    write_back_refused_chunks: int = counted(
        "write_back_refused_chunks",
        "Times a chunk was not written because disk.bytes was used up, or the file system was down to the reserve.",
    )

    packs_compacted: int = counted("packs_compacted", "Packs with holes whose chunks were moved to another pack.")
    disk_written_bytes_compaction: int = series(
        _DISK_WRITTEN, "compaction", meaning="Packs that received the chunks of packs with holes."
    )
    compaction_freed_bytes: int = counted("compaction_freed_bytes", "Bytes of disk that compaction reclaimed.")
    pack_writes_failed_compaction: int = series(
        _PACK_WRITES_FAILED,
        "compaction",
        meaning="The disk or the ledger refused; repeated, and nothing is lost.",
    )
    disk_read_bytes_scrub: int = series(_DISK_READ, "scrub", meaning="To verify chunks in the background.")
    scrub_passes: int = counted("scrub_passes", "Times the scrub finished all packs.")
    disk_breaker_opened: int = counted(
        "disk_breaker_opened", "Times the circuit breaker of the disk tier opened, after repeated errors."
    )
    disk_probes: int = counted("disk_probes", "Probes of the disk while the circuit breaker is open.")

    requests_observed: int = counted(
        "requests_observed", "Requests that engines reported, to find prompts that repeat."
    )
    requests_skipped: int = counted(
        "requests_skipped", "Requests that were not counted: too many came at once, or saved counts were being read."
    )
    auto_pins_made: int = counted("auto_pins_made", "Prompts that were found in requests, and pinned.")
    auto_pins_ended: int = counted(
        "auto_pins_ended", "Automatic pins that ended for better ones, or for a pin that was asked for."
    )

    damaged_chunks_disk: int = series(
        _DAMAGED_CHUNKS,
        "disk",
        meaning="Stored bytes were short, failed their checksum, or lay on a bad sector: a miss.",
    )
    tampered_chunks: int = counted(
        "tampered_chunks",
        "Sealed chunks that did not open: not what was sealed for their place. Then they are damaged.",
    )
    key_missing_reads: int = counted(
        "key_missing_reads", "Reads of chunks whose key is not in disk.key_file: misses; the chunks stay."
    )
    damaged_chunks_host: int = series(
        _DAMAGED_CHUNKS,
        "host",
        meaning="Bytes in memory failed their checksum, before write-back or in `kvtier verify`: dropped.",
    )
    orphan_slots_recovered: int = series(
        _ORPHAN_SLOTS, "recovered", meaning="Verified, and served without a disk read."
    )
    orphan_slots_rejected: int = series(
        _ORPHAN_SLOTS, "rejected", meaning="Dropped because mark, key or bytes did not match."
    )
    packs_set_aside: int = counted(
        "packs_set_aside", "Damaged packs without an intact chunk, which kvtier renamed and does not read again."
    )
    slots_quarantined: int = counted(
        "slots_quarantined", "Arena slots that no engine gets: a process of a lost session may still write them."
    )

    request_pins_made: int = series(_REQUEST_PINS, "made", meaning="A new pin.")
    request_pins_extended: int = series(_REQUEST_PINS, "extended", meaning="A pin that stood ends later now.")
    request_pins_refused: int = series(
        _REQUEST_PINS, "refused", meaning="A limit of the owner or of all owners is reached, or the name is taken."
    )

    requests_hit: int = _outcome(RequestOutcome.HIT)
    requests_part: int = _outcome(RequestOutcome.PART)
    requests_diverged: int = _outcome(RequestOutcome.DIVERGED)
    requests_unknown: int = _outcome(RequestOutcome.UNKNOWN)
    requests_too_short: int = _outcome(RequestOutcome.TOO_SHORT)
    requests_not_cacheable: int = _outcome(RequestOutcome.NOT_CACHEABLE)
    requests_cache_skipped: int = _outcome(RequestOutcome.CACHE_SKIPPED)
    requests_no_session: int = _outcome(RequestOutcome.NO_SESSION)
    requests_breaker_open: int = _outcome(RequestOutcome.BREAKER_OPEN)
    requests_late: int = _outcome(RequestOutcome.LATE)
    requests_slower: int = _outcome(RequestOutcome.SLOWER)
    requests_not_stored: int = _outcome(RequestOutcome.NOT_STORED)
    requests_no_slot: int = _outcome(RequestOutcome.NO_SLOT)
    requests_disk_off: int = _outcome(RequestOutcome.DISK_OFF)
    requests_over_limit: int = _outcome(RequestOutcome.OVER_LIMIT)
    requests_load_failed: int = _outcome(RequestOutcome.LOAD_FAILED)
    requests_adapter_not_ready: int = _outcome(RequestOutcome.ADAPTER_NOT_READY)
    requests_not_promoted: int = _outcome(RequestOutcome.NOT_PROMOTED)
    requests_quarantined: int = _outcome(RequestOutcome.QUARANTINED)
    requests_unreported: int = counted(
        "requests_unreported", "Requests that engines could not report: too many ended without a session, or at once."
    )
    prompt_tokens_device: int = series(_PROMPT_TOKENS, "device", meaning="vLLM's own prefix cache.")
    prompt_tokens_host: int = series(_PROMPT_TOKENS, "host", meaning="kvtier, from host memory.")
    prompt_tokens_disk: int = series(_PROMPT_TOKENS, "disk", meaning="kvtier, read from disk for the request.")
    prompt_tokens_computed: int = series(_PROMPT_TOKENS, "computed", meaning="vLLM computed them.")
    saved_prefill_seconds: float = counted(
        "saved_prefill_seconds",
        "Seconds that prefill of the tokens from host and disk would have taken, at the engine's rate of that time. "
        "Gross: the time that loading them took is not subtracted.",
    )

    io_errors_host_populate: int = series(_IO_ERRORS, "host", "populate")
    io_errors_host_release: int = series(_IO_ERRORS, "host", "release")
    io_errors_disk_open: int = series(_IO_ERRORS, "disk", "open")
    io_errors_disk_read: int = series(_IO_ERRORS, "disk", "read")
    io_errors_disk_write: int = series(_IO_ERRORS, "disk", "write")
    io_errors_disk_fsync: int = series(_IO_ERRORS, "disk", "fsync")
    io_errors_disk_rename: int = series(_IO_ERRORS, "disk", "rename")
    io_errors_disk_unlink: int = series(_IO_ERRORS, "disk", "unlink")
    io_errors_ledger_transaction: int = series(_IO_ERRORS, "ledger", "transaction")

    calls_refused_unauthenticated: int = series(
        _CALLS_REFUSED, "unauthenticated", meaning="No credentials, or wrong ones."
    )
    calls_refused_forbidden: int = series(
        _CALLS_REFUSED, "forbidden", meaning="The caller's role or owner does not allow it."
    )
    calls_refused_too_many: int = series(
        _CALLS_REFUSED,
        "too_many",
        meaning="The caller makes too many, or has too many open, or its address sent too many wrong credentials.",
    )
    calls_refused_silent: int = series(
        _CALLS_REFUSED, "silent", meaning="The call was begun, and its message did not come in time."
    )
    audit_lines_written: int = series(_AUDIT_LINES, "written")
    audit_lines_lost: int = series(
        _AUDIT_LINES, "lost", meaning="The file could not be written, or too many lines waited."
    )

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name, whole numbers all."""
        return {name: int(value) for name, value in asdict(self).items()}
