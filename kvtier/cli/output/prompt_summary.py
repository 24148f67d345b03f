"""The numbers and the state of a prompt, summed over its bindings."""

from dataclasses import dataclass, fields

from kvtier._pb.cache_pb2 import PromptStatus

_STATE_MEANINGS = {
    PromptStatus.UNRENDERED: "not yet turned into tokens; run `kvtier pin {name}` while vLLM runs",
    PromptStatus.WAITING: "no vLLM with the kvtier connector has recognized it yet",
    PromptStatus.CAPTURING: "chunks are stored as vLLM computes them",
    PromptStatus.DURABLE: "every chunk is on disk and survives kill -9 and reboot",
    PromptStatus.OVER_QUOTA: "disk.bytes is used up; unpin and evict a prompt, or raise it",
}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Sums over the namespaces of attached engines, or over the last namespace if none is attached.

    `covered_tokens` is the largest.
    """

    covered_tokens: int
    num_chunks: int
    num_host_chunks: int
    num_durable_chunks: int
    num_shared_chunks: int
    raw_bytes: int
    durable_raw_bytes: int
    disk_bytes: int
    disk_share_bytes: int

    @property
    def complete(self) -> bool:
        """Whether every chunk is durable, and there is at least one."""
        return 0 < self.num_chunks <= self.num_durable_chunks

    @property
    def missing(self) -> bool:
        """Whether some chunk may be neither in host memory nor on disk.

        A chunk that is in both hides one that is in neither, so False is a guess; the next status may correct it.
        """
        return self.num_host_chunks + self.num_durable_chunks < self.num_chunks


def state_name(status: PromptStatus) -> str:
    if status.state not in _STATE_MEANINGS:
        return "unknown"  # of a newer daemon
    return "refused" if is_refused(status) else PromptStatus.State.Name(status.state).lower().replace("_", " ")


def state_meaning(status: PromptStatus) -> str:
    """Return the meaning of the state, and the next step if there is one."""
    if is_refused(status):
        return "vLLM cannot use it; `error` says why"
    return _STATE_MEANINGS.get(status.state, "").format(name=status.name)


def summarize(status: PromptStatus) -> Summary:
    bindings = [b for b in status.bindings if b.live] or list(status.bindings)[-1:]
    covered_tokens = max((b.covered_tokens for b in bindings), default=0)
    summed = [field.name for field in fields(Summary) if field.name != "covered_tokens"]
    return Summary(covered_tokens=covered_tokens, **{name: sum(getattr(b, name) for b in bindings) for name in summed})


def is_refused(status: PromptStatus) -> bool:
    """Return whether vLLM cannot use the prompt; `error` says why."""
    return bool(status.error) and status.state == PromptStatus.WAITING
