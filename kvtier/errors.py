"""Every error kvtier raises on purpose, under one root.

An error message names what was wrong (field and value) and what to do about it. Misses, pending answers and full tiers
are results, not errors. `kvtier.rpc.error_statuses` maps each leaf to one gRPC status.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

from kvtier.printable import SHOWN_CHARS, printable, shortened, shown_value

SECRET_FIELDS = frozenset({"tokens", "token_ids", "cache_salt", "recipe_json"})
"""Fields of a prompt whose value no message shows; how many there are is no secret."""


class KvtierError(Exception):
    """Root of all errors that kvtier raises on purpose. Its text is bounded, whatever it quotes."""

    def __init__(self, text: str = "") -> None:
        super().__init__(shortened(text))


class ConfigError(KvtierError):
    """A setting is unknown or unusable.

    Attributes:
        key: Dotted name of the setting.
        value: The offending value as given.
        source: Where it came from: a file path, `environment` or `flag`.
    """

    def __init__(self, key: str, value: object, source: str, problem: str) -> None:
        super().__init__(f"{source}: {printable(key, SHOWN_CHARS)} = {shown_value(value)}: {problem}")
        self.key, self.value, self.source = key, value, source


class ConfigErrors(KvtierError):
    """Settings are unknown or unusable: `errors` has all that were found."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        super().__init__("; ".join(map(str, errors)))
        self.errors = tuple(errors)


class InvalidArgumentError(KvtierError):
    """A request carries a field that cannot be used.

    Attributes:
        field: The field's name as the caller knows it; empty when the daemon found the mistake, whose message says it.
        value: The offending value; the message shows it shortened.
        remedy: What is wrong with it, and what to do.
    """

    field: str = ""
    value: object = None

    def __init__(self, field: str, value: object, remedy: str) -> None:
        is_secret = field.rpartition(".")[2] in SECRET_FIELDS and not isinstance(value, int)
        super().__init__(f"{field} = {'<withheld>' if is_secret else shown_value(value)}: {remedy}")
        self.field, self.value, self.remedy = field, value, remedy


class PromptNotFoundError(KvtierError):
    """No prompt has this name, or is this version of one."""

    def __init__(self, name: str, versions: Sequence[str] = ()) -> None:
        remedy = f"there are {', '.join(versions)}" if versions else "`kvtier list` shows the names"
        super().__init__(f"no prompt named {shown_value(name)}; {remedy}")


class RequestNotFoundError(KvtierError):
    """No recent request has this id."""

    def __init__(self, request_id: str, num_kept: int) -> None:
        super().__init__(
            f"none of the last {num_kept} requests has the id {shown_value(request_id)}; ids are those of vLLM's "
            "answers, and the last 4096 requests that have ended since the daemon's start are kept"
        )


class PromptUnusableError(KvtierError):
    """Engines cannot use a prompt: it is shorter than a chunk, or longer than they take."""


class PromptExistsError(KvtierError):
    """The name is taken by a prompt with other tokens, model, LoRA or salt; or by any, at a rename to `new_name`."""

    def __init__(self, name: str, differs_in: str = "content", *, new_name: str = "") -> None:
        text = (
            f"prompt {name!r} exists and differs in {differs_in}; pass --replace to replace it, or choose another name"
        )
        if new_name:
            text = (
                f"new_name = {new_name!r}: prompt {name!r} exists; choose another name, or forget that one first: "
                f"kvtier unpin {name}, then kvtier evict {name}"
            )
        super().__init__(text)


class PromptPinnedError(KvtierError):
    """The prompt is pinned, and eviction was not forced."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"prompt {name!r} is pinned; `kvtier unpin {name}` first, or `kvtier evict {name} --force` to drop its "
            "chunks and keep the pin"
        )


class PromptNotPinnedError(KvtierError):
    """How a prompt is pinned can only be changed while an operator has it pinned."""

    def __init__(self, name: str, origin: str) -> None:
        why = {
            "auto": f"is an automatic pin; give it a name with `kvtier pin NAME --adopt {name}`",
            "request": "is the pin of a client's requests, which say how long and with what priority",
        }
        super().__init__(f"prompt {name!r} {why.get(origin, 'is not pinned')}")


class PromptUnrenderedError(KvtierError):
    """The prompt has a source, and no tokens yet."""

    def __init__(self, name: str) -> None:
        super().__init__(f"prompt {name!r} is not turned into tokens yet; run `kvtier pin {name}` while vLLM runs")


class QuotaExceededError(KvtierError):
    """A prompt would take `needed_bytes` of the disk, of whose `limit_bytes` pinned prompts take `used_bytes`.

    All that is in the namespace; in all of them, if none is named.
    """

    def __init__(
        self, name: str, needed_bytes: int, used_bytes: int, limit_bytes: int, namespace_id: str | None = None
    ) -> None:
        super().__init__(
            f"prompt {name!r} needs about {needed_bytes} bytes on disk, pinned prompts hold {used_bytes} of "
            f"{limit_bytes}; unpin and evict a prompt, or raise disk.bytes"
        )
        self.needed_bytes, self.used_bytes, self.namespace_id = needed_bytes, used_bytes, namespace_id
        self.short_bytes = needed_bytes + used_bytes - limit_bytes


class OwnerQuotaError(KvtierError):
    """An owner would have more than its quota of `what`: pins, tokens or bytes."""

    def __init__(self, owner: str, what: str, added: int, used: int, limit: int) -> None:
        super().__init__(
            f"owner {shown_value(owner)} has {used} of {limit} {what}, and this adds {added}; unpin a prompt of it, or "
            f"raise {what} for it in [owners] of the daemon's configuration"
        )
        self.owner, self.what, self.added, self.used, self.limit = owner, what, added, used, limit


class RequestLimitError(KvtierError):
    """Requests of an owner, or of all, have as many pins as they may have, or make too many at once."""


class DiskSpaceError(KvtierError):
    """The file system has no space for a file that exists for the length of one call.

    Args:
        what: The call.
        needed_bytes: What it would take.
        free_bytes: What the file system has left beyond the daemon's reserve.
        kept_bytes: What of that is kept for other calls, and for packs being written.
    """

    def __init__(self, what: str, needed_bytes: int, free_bytes: float, kept_bytes: int) -> None:
        super().__init__(
            f"{what} needs {needed_bytes} bytes of disk space while it runs; the file system has {free_bytes} left "
            f"beyond the daemon's reserve, of which {kept_bytes} are kept for what runs already; free space, or try "
            "again when that has ended"
        )


class NamespaceMismatchError(KvtierError):
    """A namespace was opened with another layout than it has, or keys of one call span namespaces."""


class ArenaError(KvtierError):
    """The shared-memory arena cannot be created, mapped or trusted."""


class ArenaFullError(ArenaError):
    """No arena fits: host.bytes, the file system or the daemon's descriptors have no place for one."""


class TierIOError(KvtierError):
    """The operating system refused a read or write of a tier.

    Attributes:
        path: Of the file or folder.
        errno: The system's number, None where it has none.
    """

    def __init__(self, path: Path, action: str, cause: OSError) -> None:
        super().__init__(f"cannot {action} {path}: {cause.strerror or cause}")
        self.path, self.errno = path, cause.errno


class ChunkDamagedError(KvtierError):
    """Stored bytes are not what was written (short, or the checksum differs). The chunk is a miss.

    Attributes:
        path: The pack.
        key: The chunk, where one is known.
    """

    def __init__(self, path: Path, what: str, key: bytes | None = None) -> None:
        super().__init__(f"{path}: {what}")
        self.path, self.key = path, key


class ChunkTamperedError(ChunkDamagedError):
    """A sealed chunk does not open: its bytes, or what its row or header says of it, are not what was sealed."""


class KeyMissingError(KvtierError):
    """Something is sealed with a key that is not in the key file.

    Attributes:
        name: Of the key: its ID, a dot, its fingerprint.
    """

    def __init__(self, what: str, name: str, path: str) -> None:
        key_id = name.rpartition(".")[0] or name
        where = f"which {path} lacks" if path else "and disk.key_file is off"
        super().__init__(
            f"{what} is sealed with key {shown_value(name)}, {where}; put back the line that began with "
            f"{shown_value(key_id)} behind the first one of the file that disk.key_file names"
        )
        self.name = name


class ChunkSealedError(TierIOError):
    """A chunk is sealed with a key that is not in the key file: a miss, and it stays."""

    def __init__(self, path: Path, cause: KeyMissingError) -> None:
        super().__init__(path, "open", OSError(0, str(cause)))
        self.name = cause.name


class FormatVersionError(KvtierError):
    """A file was written by a newer kvtier than this one."""

    def __init__(self, path: Path, found: int, known: int) -> None:
        super().__init__(f"{path} has format version {found}, this kvtier knows {known}; upgrade kvtier")
        self.path, self.found, self.known = path, found, known


class LedgerError(KvtierError):
    """SQLite refused; nothing of the transaction happened."""


class AlreadyRunningError(KvtierError):
    """Another daemon holds the lock of this folder."""

    def __init__(self, lock_path: Path, pid: int | None) -> None:
        who = f"pid {pid}" if pid else "another process"
        super().__init__(
            f"{lock_path} is held by {who}; stop that daemon, or give this one another disk.dir (--disk-dir)"
        )
        self.pid = pid


START_DAEMON = "start `kvtier-daemon`, or pass --socket"


class DaemonUnreachableError(KvtierError):
    """No daemon answers at the address, a socket's path."""

    def __init__(self, address: str, problem: str, remedy: str = START_DAEMON) -> None:
        super().__init__(f"no kvtier-daemon answers at {address} ({problem}); {remedy}; `kvtier doctor` says more")
        self.address, self.problem, self.remedy = address, problem, remedy


class ConnectionLostError(DaemonUnreachableError):
    """The connection ended during a call, and a process listens at the address: what came of the call is not known."""

    def __init__(self, address: str, remedy: str = START_DAEMON) -> None:
        super().__init__(address, "it closed the connection; it may be starting or stopping", remedy)


class DaemonSilentError(DaemonUnreachableError):
    """A process holds the socket and does not answer. While it lives, no other daemon can take its place."""

    def __init__(self, address: str, waited_s: float, pid: int | None, *, is_stopped: bool) -> None:
        holder = f"pid {pid}" if pid else "a process"
        problem = f"{holder} holds the socket, no answer within {waited_s:g} s"
        if is_stopped:
            super().__init__(address, f"{problem}: it is stopped", f"let it run again: kill -CONT {pid}")
            return
        kill = f"kill -KILL {pid}" if pid else "kill -KILL"
        remedy = (
            f"look at its log; if it stays silent, end it ({kill}) and start it again: pins and durable chunks stay"
        )
        super().__init__(address, problem, remedy)


class ServerUnreachableError(DaemonUnreachableError):
    """No daemon answers at an address of TCP, or not over a connection that can be trusted."""

    def __init__(self, address: str, problem: str, remedy: str) -> None:
        KvtierError.__init__(self, f"no kvtier-daemon answers at {shown_value(address)} ({problem}); {remedy}")
        self.address, self.problem, self.remedy = address, problem, remedy


class UntrustedSocketError(KvtierError):
    """Another user is, or could put itself, on the other end of the daemon's socket; nothing was sent.

    Attributes:
        uid: Whose process or folder was found.
        expected: The uids that are trusted.
        found: The message without the remedy.
    """

    def __init__(self, socket: Path, problem: str, uid: int, expected: Collection[int], remedy: str) -> None:
        uids = " and ".join(str(each) for each in sorted(expected))
        self.found = f"{socket} is not trusted, and nothing was sent: {problem}, trusted is uid {uids}"
        super().__init__(f"{self.found}; {remedy}")
        self.socket, self.uid, self.expected, self.remedy = socket, uid, frozenset(expected), remedy


_TOKEN_REMEDY = (
    "send a token that `kvtier token create` has made on the daemon's host (--token-file, KVTIER_TOKEN, or the header "
    '"Authorization: Bearer TOKEN")'
)


class UnauthenticatedError(KvtierError):
    """The daemon does not know who calls: no credentials, wrong ones, or ones that are over or revoked."""

    def __init__(self, problem: str, remedy: str = _TOKEN_REMEDY) -> None:
        super().__init__(f"{problem}; {remedy}")


class ForbiddenError(KvtierError):
    """The caller is known and may not do this."""

    def __init__(self, call: str, name: str, role: str, remedy: str) -> None:
        super().__init__(f"{shown_value(name)} ({role}) may not call {call}: {remedy}")


class TooManyCallsError(KvtierError):
    """A caller makes more calls, or an address sends more wrong credentials, than are answered."""


class NameTakenError(KvtierError):
    """A prompt that the caller may not see has the name."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the name {shown_value(name)} is taken, by a prompt of another owner; choose another name, for example "
            "one that begins with your team's"
        )


class GrantExistsError(KvtierError):
    """A grant of this name, or for this certificate, exists."""

    def __init__(self, field: str, value: str) -> None:
        super().__init__(
            f"{field} = {shown_value(value)}: a grant has it; choose another, or end that one: kvtier token revoke"
        )


class GrantNotFoundError(KvtierError):
    """There is no grant of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no grant named {shown_value(name)}; `kvtier token list` shows the names")


class GrantsUnusableError(KvtierError):
    """The file of grants cannot be read or written; while it cannot be read, no grant counts."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(
            f"{path} {problem}; no token and no certificate counts meanwhile. Put a copy of it back, or move it away "
            "and make new grants: kvtier token create (over the unix socket)"
        )


class DrainingError(KvtierError):
    """The daemon is shutting down and takes no new work."""

    def __init__(self) -> None:
        super().__init__("the daemon is shutting down; try again when it is back")


class BundleDamagedError(KvtierError):
    """The bytes given to `kvtier import` are no whole, undamaged bundle that this kvtier can read."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the bundle cannot be taken in: {problem}")


class BundleTooNewError(BundleDamagedError):
    """A newer kvtier wrote the bundle: it may be whole, and this one cannot read it."""


class PromptNotDurableError(KvtierError):
    """The prompt cannot be exported: it is not whole on disk, or it is not clear in which namespace."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"prompt {name!r} cannot be exported: {why}")


class PromptNotBoundError(KvtierError):
    """No namespace has the prompt, or not the one that was named."""

    def __init__(self, name: str, namespace_id: str = "") -> None:
        where = f"not in namespace {namespace_id!r}" if namespace_id else "in none"
        super().__init__(
            f"prompt {name!r}: engines have recognized it {where}; `kvtier show {name}` lists its namespaces, and a "
            "vLLM with the connector that serves its model adds one"
        )


class NamespaceNotFoundError(KvtierError):
    """There is no namespace of this id."""

    def __init__(self, namespace_id: str) -> None:
        super().__init__(f"no namespace {namespace_id!r}; `kvtier status` lists them")


class NamespaceQuarantinedError(KvtierError):
    """The namespace is quarantined: nothing is stored in it."""

    def __init__(self, namespace_id: str, reason: str) -> None:
        super().__init__(
            f"namespace {namespace_id} is quarantined ({reason}); look at its chunks, then evict or release them"
        )


class EphemeralNamespaceError(KvtierError):
    """An ephemeral namespace, which lives as long as its engines, cannot be quarantined."""

    def __init__(self, namespace_id: str) -> None:
        super().__init__(f"namespace {namespace_id} is ephemeral: it ends with its engines, so end these instead")


class TooManyWatchersError(KvtierError):
    """As many clients watch events as may, or as may for one caller."""


class StuckError(KvtierError):
    """Calls of the operating system have not returned, so the daemon cannot end in order.

    Args:
        waited_s: How long the daemon waited for them.
        stuck: What kinds of calls: of the threads `kvtier-KIND`.
    """

    def __init__(self, waited_s: float, stuck: Sequence[str]) -> None:
        super().__init__(
            f"calls ({', '.join(stuck) or 'of unknown kind'}) have not returned within {waited_s:g} s after the drain; "
            "the daemon ends without them, as if killed: nothing durable is lost. Look after the disk (dmesg)"
        )


class HelloTimeoutError(KvtierError):
    """A stream was opened to attach an engine, and no message came on it."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(
            f"no Hello within {waited_s:g} s; a session begins with it, so open the stream only when it can be sent, "
            "and open another one now"
        )


class MessageTimeoutError(KvtierError):
    """A call over TCP was begun, and its next message did not come."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(f"no message of the call came within {waited_s:g} s; begin a call only when it can be sent")


class SessionRefusedError(KvtierError):
    """The daemon refused this engine's Hello; trying again with the same Hello is useless."""


class RenderError(KvtierError):
    """vLLM could not render the prompt to tokens."""


class RemoteStoreError(KvtierError):
    """The store that several hosts share did not do what it was asked."""


class RemoteUnavailableError(RemoteStoreError):
    """The store does not answer, or cannot now; a later try may succeed."""

    def __init__(self, url: str, action: str, problem: str) -> None:
        super().__init__(f"cannot {action} at {url}: {problem}; kvtier tries again by itself")


class RemoteRefusedError(RemoteStoreError):
    """The store refuses: credentials, permissions, or a bucket that is not there."""

    def __init__(self, url: str, action: str, problem: str) -> None:
        super().__init__(
            f"{url} refuses to {action}: {problem}; check remote.url, the credentials in the daemon's environment, and "
            "what they are allowed to do"
        )


class RemoteMissingError(RemoteStoreError):
    """There is no such object in the store."""

    def __init__(self, url: str, key: str) -> None:
        super().__init__(f"{url} has no object {key}; it was deleted meanwhile, or by another program")


class RemoteDamagedError(RemoteStoreError):
    """An object in the store is not what was written there."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"the object {key} in the store is not what was written: {problem}")


class RemoteNewerError(RemoteDamagedError):
    """An object in the store is whole, and this kvtier cannot read what it says: a newer one has written it."""

    def __init__(self, key: str, problem: str) -> None:
        remedy = "if a newer kvtier has written it, upgrade kvtier on this host"
        RemoteStoreError.__init__(self, f"the object {key} in the store cannot be read here: {problem}; {remedy}")


class RemoteSealedError(RemoteDamagedError):
    """An object in the store is sealed with a key that this host lacks: it may be whole, and others may read it."""

    def __init__(self, key: str, cause: KeyMissingError) -> None:
        RemoteStoreError.__init__(self, f"{cause}; all hosts of a fleet need the keys of each other")
        self.key, self.name = key, cause.name
