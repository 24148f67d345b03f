"""How a daemon stands with the store that hosts share.

As `public_values`: a field has the name of the message's field in proto/kvtier/v1/cache.proto.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RefusedSharedPin:
    """A pin of the store that the daemon cannot take."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True)
class RemoteSpending:
    """What was asked of the store since the daemon's start, without what the store's client repeats by itself.

    Attributes:
        dollars: At the prices of the settings.
    """

    num_reads: int
    num_writes: int
    num_lists: int
    num_deletes: int
    num_failed: int
    bytes_up: int
    bytes_down: int
    dollars: float


@dataclass(frozen=True, kw_only=True)
class RemoteHost:
    """A host that shares the store; `seen_unix_s`: when it wrote there last, by the store's clock."""

    host: str
    version: str
    seen_unix_s: float


@dataclass(frozen=True, kw_only=True)
class RemoteStatus:
    """The store, and what is there.

    Attributes:
        url: Without secrets; empty: remote.url is off.
        host: The daemon's name in the store.
        problem: Why the store cannot be used now; empty: it can.
        looked_unix_s: When its pins were read last; 0: not since the start.
        clock_offset_s: How far the store's clock is ahead.
        num_waiting_pins: Pins of the daemon that the store does not have as they are there.
        num_uploaded: Prompts that the daemon has uploaded since its start; `num_restored`: that it got from the store.
        num_conflicts: Names that two hosts had pinned with other content at once.
        hosts: Only if they were asked for.
    """

    url: str
    host: str
    problem: str
    looked_unix_s: float
    clock_offset_s: float
    num_pins: int
    num_kv_objects: int
    kv_bytes: int
    num_waiting_pins: int
    num_uploaded: int
    num_restored: int
    num_conflicts: int
    refused: tuple[RefusedSharedPin, ...]
    spending: RemoteSpending
    hosts: tuple[RemoteHost, ...]
