"""The numbers of a prompt, summed over its bindings."""

from dataclasses import dataclass, fields

from kvtier.library.values.public_values import Prompt


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Sums over the namespaces of attached engines, or over the last namespace if none is attached.

    `covered_tokens` is the largest.
    """

    covered_tokens: int
    num_chunks: int
    num_host_chunks: int
    num_durable_chunks: int
    num_kept_chunks: int
    num_shared_chunks: int
    raw_bytes: int
    durable_raw_bytes: int
    disk_bytes: int
    disk_share_bytes: int

    @property
    def complete(self) -> bool:
        """Whether every chunk is durable, and there is at least one."""
        return 0 < self.num_chunks <= self.num_kept_chunks

    @property
    def missing(self) -> bool:
        """Whether some chunk may be neither in host memory nor on disk.

        A chunk that is in both hides one that is in neither, so False is a guess; the next status may correct it.
        """
        return self.num_held_chunks < self.num_chunks

    @property
    def num_held_chunks(self) -> int:
        """At most this number of chunks are in host memory or on disk: those in both count twice."""
        return self.num_host_chunks + self.num_durable_chunks


def summarize(prompt: Prompt) -> Summary:
    """Return the sums."""
    bindings = [binding for binding in prompt.bindings if binding.live] or prompt.bindings[-1:]
    covered_tokens = max((binding.covered_tokens for binding in bindings), default=0)
    summed = [field.name for field in fields(Summary) if field.name != "covered_tokens"]
    sums = {name: sum(getattr(binding, name) for binding in bindings) for name in summed}
    return Summary(covered_tokens=covered_tokens, **sums)
