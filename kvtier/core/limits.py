"""The bound of every field that comes from outside: one table for messages, for bundles, and for what engines send.

A value is checked before anything is recorded or allocated for it, so that what is recorded can always be read back and
sent. docs/format.md lists the same bounds. What is in a ledger already is read without them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtier.core.layout import GROUP_SUFFIX_BYTES, ChunkKey, GroupLayout, KVLayout
from kvtier.errors import InvalidArgumentError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@-]{0,127}")
_VERSION = re.compile(r"(.+)@([1-9][0-9]{0,8})")
AUTO_PIN_PREFIX = "auto-"
"""Names that begin like this are those of automatic pins: neither operators nor requests may take one."""


@dataclass(frozen=True)
class Whole:
    """A whole number between two bounds, both included."""

    least: int
    most: int

    def check(self, field: str, value: object) -> int:
        """Return the number; raise InvalidArgumentError if it is none, or out of bounds."""
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidArgumentError(field, value, "must be a whole number")
        if not self.least <= value <= self.most:
            raise InvalidArgumentError(field, value, f"use {self.least} to {self.most}")
        return value


@dataclass(frozen=True)
class Text:
    """Text that UTF-8 can say, without NUL, of bounded length."""

    max_bytes: int
    may_be_empty: bool = True

    def check(self, field: str, value: object) -> str:
        """Return the text; raise InvalidArgumentError if it is none, too long, empty and must not be, or no UTF-8."""
        if not isinstance(value, str):
            raise InvalidArgumentError(field, value, "must be text")
        if not value and not self.may_be_empty:
            raise InvalidArgumentError(field, value, "must not be empty")
        try:
            num_bytes = len(value.encode())
        except UnicodeEncodeError as exc:
            raise InvalidArgumentError(field, value, "has a character that UTF-8 cannot say") from exc
        if num_bytes > self.max_bytes:
            raise InvalidArgumentError(field, value, f"has {num_bytes} bytes, at most {self.max_bytes} are supported")
        if "\0" in value:
            raise InvalidArgumentError(field, value, "must not have a NUL character")
        return value

    def takes(self, value: object) -> bool:
        """Return whether `check` returns it."""
        try:
            self.check("text", value)
        except InvalidArgumentError:
            return False
        return True


# Prompts
MAX_TOKENS = 2**20
"""Of one prompt; the longest context windows of published models have about that many."""
TOKEN = Whole(0, 2**32 - 1)
TTL_S = Whole(0, 100 * 365 * 24 * 3600)
"""0: no end."""
PRIORITY = Whole(-100, 100)
TEXT = Text(4096)
"""Models, LoRA names, paths (PATH_MAX), salts."""
REASON = Text(1000, may_be_empty=False)
"""Why an operator quarantines a namespace."""
MAX_READY_NAMES = 16_384
"""Prompts that a client asks about at once, or events by name."""
RECIPE = Text(8 * 1024**2)
"""A prompt's source: one of `MAX_TOKENS` has 4 to 5 MB of text."""

OWNER = re.compile(r"([A-Za-z0-9][A-Za-z0-9._/@-]{0,63})?")
LABEL_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
LABEL_VALUE = re.compile(r"[A-Za-z0-9._/@:+-]{0,128}")
OWN_LABELS = "kvtier/"
"""Keys that begin like this are kvtier's own: only `ApplyPrompts` sets them."""
SET_LABEL = f"{OWN_LABELS}set"
"""Label of what was applied from files: the name of their set."""
NUM_LABELS = Whole(0, 32)
MAX_APPLIED = 2**16
"""Pins that are made and ended at once."""
MAX_APPLIED_BYTES = 512 * 1024**2
"""Of all their messages: they are in memory until all have come."""
APPLIED_MESSAGE_BYTES = 2048
"""Memory that one message takes beyond its own bytes."""
MAX_OPEN_APPLIED_BYTES_EACH = MAX_APPLIED_BYTES + MAX_APPLIED * APPLIED_MESSAGE_BYTES
"""Of all applies of one caller that are open: as much as the largest one takes."""
MAX_OPEN_APPLIED_BYTES = 2 * MAX_OPEN_APPLIED_BYTES_EACH
"""Of all callers: one of them leaves as much to the others. Token ids take up to four times that in memory."""

# Chunk keys
MAX_KEYS = 2**17
"""Keys, slots or indexes of one message, chunks of one prompt: `MAX_TOKENS` in chunks of 16, of two KV cache groups."""
MAX_MESSAGE_BYTES = 16 * 1024**2
"""What gRPC parses in one go, on the loop: enough for each field above at its most, 13 MiB for a Pin."""
PIECE_BYTES = 1024**2
"""Of a bundle in one message, of a page of a list: what is read, made and sent at once."""
KEY_BYTES = Whole(GROUP_SUFFIX_BYTES + 1, 64)
"""vLLM's are 36: a SHA-256 and the group."""

# Engines
ENGINE_TEXT = Text(256)
"""Versions."""
ENGINE_ID = Text(256, may_be_empty=False)
MODEL_NAME = Text(4096, may_be_empty=False)
NUM_MODEL_NAMES = Whole(1, 256)
NUM_FINGERPRINT_FIELDS = Whole(1, 64)
FINGERPRINT_FIELD = Text(128, may_be_empty=False)
FINGERPRINT_BYTES = Whole(1, 1024**2)
"""Of all values together: a model's configuration and a digest of each of its files; the largest known has 0.5 MB."""
STORE_CREDITS = Whole(1, 4096)
PREFILL_TOKENS_PER_S = (1e-3, 1e9)
MAX_ASKED_PINS = 1024
"""Whose blocks an engine is to count, in one message."""

MAX_MESSAGES = 1024
"""That an engine sends at once."""

# What requests begin with
MAX_SEEN_REQUESTS = 1024
"""Of one message."""
PLACE_TEXT = Text(1024)
PLACE_EXAMPLE = Text(256)
MAX_PLACE_EXAMPLES = 3
NUM_PROMPTS = Whole(1, 2**16)

# How requests ended
MAX_ENDED_REQUESTS = 1024
"""Of one message."""
REQUEST_ID = Text(256, may_be_empty=False)
PIN_ID = Text(64)
ENDED_TOKENS = Whole(0, 2**32 - 1)
MAX_LISTED_REQUESTS = Whole(0, 4096)

# Layouts
NUM_RANKS = Whole(1, 1024)
RANK_BYTES = Whole(1, 2**36)
"""With the most ranks, a row is 2**46 bytes: all sums over chunks stay below 2**63."""
NUM_GROUPS = Whole(1, 256)
GROUP_IDX = Whole(0, 2**16 - 1)
CHUNK_TOKENS = Whole(1, MAX_TOKENS)
WINDOW_CHUNKS = Whole(0, MAX_TOKENS)
_LAYOUT_FIELDS = {"num_ranks": NUM_RANKS, "rank_bytes": RANK_BYTES, "num_writers": NUM_RANKS}
_GROUP_FIELDS = {
    "group_idx": GROUP_IDX,
    "chunk_tokens": CHUNK_TOKENS,
    "useful_bytes": RANK_BYTES,
    "window_chunks": WINDOW_CHUNKS,
}

# Requests that ask for pins
NUM_REQUESTED_PREFIXES = Whole(1, 4)
"""As many breakpoints as hosted APIs take."""
PREFIX_TOKENS = Whole(1, MAX_TOKENS)
PREFIX_DIGEST_BYTES = 16
_REQUEST_OWNER = re.compile(r"[0-9a-f]{16}")
MAX_PREFETCHED_KEYS = 2**16
"""Chunks of a namespace that may wait for a prefetch that an engine has asked for: 2.4 MB of keys."""

# Files
MAX_SAFETENSORS_HEADER_BYTES = 100_000_000
"""Source: safetensors 0.8.0, tensor.rs, MAX_HEADER_SIZE."""

# One session. More is answered as a miss: the engine computes, and asks again when it has released some.
MAX_ACQUIRES = 2**14
"""Acquires that were not released: far more than requests that an engine runs at once. Each takes 1.5 kB."""
MAX_LEASED_CHUNKS = 2**22
"""Of all of them together; each takes some 100 bytes."""


def is_name(value: object) -> bool:
    """Say whether a prompt may have this name."""
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def check_name(value: object, field: str = "name") -> str:
    """Return a prompt's name; raise InvalidArgumentError if it cannot be one."""
    if not isinstance(value, str) or not is_name(value):
        remedy = "use 1 to 128 letters, digits and . _ / @ -, beginning with a letter or digit"
        raise InvalidArgumentError(field, value, remedy)
    return value


def version_name(name: str, number: int) -> str:
    """Return the name of a prompt's version that does not have the prompt's name now."""
    return f"{name}@{number}"


def parse_version(name: str) -> tuple[str, int] | None:
    """Return the prompt and the number of what is named like a version of it, else None."""
    match = _VERSION.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def check_chosen_name(field: str, name: str) -> None:
    """Raise InvalidArgumentError if a prompt's name is one of automatic pins, or of versions."""
    if parse_version(name):
        remedy = "names that end in @ and a number are those of versions; choose another"
        raise InvalidArgumentError(field, name, remedy)
    if name.startswith(AUTO_PIN_PREFIX):
        remedy = f"names that begin with {AUTO_PIN_PREFIX} are those of automatic pins; choose another"
        raise InvalidArgumentError(field, name, remedy)


def check_owner(field: str, value: object) -> str:
    """Return who asks for a pin; raise InvalidArgumentError if it is neither a digest nor empty."""
    if not isinstance(value, str) or (value and not _REQUEST_OWNER.fullmatch(value)):
        raise InvalidArgumentError(field, value, "use 16 hex digits in lower case, or leave it out")
    return value


def check_operators_owner(field: str, value: str) -> str:
    """Return whose prompt it is, as an operator wrote it; raise InvalidArgumentError for what is no such name."""
    if not OWNER.fullmatch(value):
        raise InvalidArgumentError(field, value, "use 1 to 64 letters, digits and . _ / @ -, or nothing")
    return value


def check_labels(field: str, labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels; raise InvalidArgumentError for too many, or one that cannot be."""
    NUM_LABELS.check(f"number of {field}", len(labels))
    for key, value in labels.items():
        if not LABEL_KEY.fullmatch(key):
            remedy = "a label's key has 1 to 128 letters, digits and . _ / -, beginning with a letter or digit"
            raise InvalidArgumentError(field, key, remedy)
        if not LABEL_VALUE.fullmatch(value):
            remedy = "a label's value has at most 128 letters, digits and . _ / @ : + -"
            raise InvalidArgumentError(f"{field}.{key}", value, remedy)
    return dict(labels)


def check_users_labels(field: str, labels: Iterable[str]) -> None:
    """Raise InvalidArgumentError if a key of labels that a user gives is one of kvtier's own."""
    for key in labels:
        if key.startswith(OWN_LABELS):
            remedy = f"labels that begin with {OWN_LABELS} are kvtier's own; choose another key"
            raise InvalidArgumentError(field, key, remedy)


def check_digest(field: str, value: bytes) -> bytes:
    """Return the digest of a prefix; raise InvalidArgumentError if it has another length."""
    if len(value) != PREFIX_DIGEST_BYTES:
        raise InvalidArgumentError(field, f"{len(value)} bytes", f"a prefix has a digest of {PREFIX_DIGEST_BYTES}")
    return value


def check_count(field: str, num_items: int, most: int) -> None:
    """Raise InvalidArgumentError if a list is too long, before it is looked at."""
    if num_items > most:
        raise InvalidArgumentError(field, f"{num_items} of them", f"at most {most} are supported")


def check_keys(field: str, keys: Sequence[ChunkKey], layout: KVLayout) -> None:
    """Refuse keys that cannot be those of a prompt's chunks.

    Raises:
        InvalidArgumentError: There are none or too many, one comes twice or is of no group, or their lengths differ.
    """
    if not keys:
        raise InvalidArgumentError(field, [], "must name at least one chunk; say with `error` why there is none")
    check_count(field, len(keys), MAX_KEYS)
    groups = set(layout.group_indexes())
    for key in keys:
        check_key(field, key, groups)
    if len({len(key) for key in keys}) > 1:
        raise InvalidArgumentError(field, sorted({len(key) for key in keys}), "all keys must have one length")
    if len(set(keys)) < len(keys):
        raise InvalidArgumentError(field, f"{len(keys)} of them", "each key may come once")


def check_key(field: str, key: ChunkKey, groups: set[int]) -> None:
    """Refuse a key that is no chunk's of these KV cache groups.

    Raises:
        InvalidArgumentError: It has no possible length, or is of another group.
    """
    if not KEY_BYTES.least <= len(key) <= KEY_BYTES.most:
        remedy = f"has {len(key)} bytes, a hash and its group suffix have {KEY_BYTES.least} to {KEY_BYTES.most}"
        raise InvalidArgumentError(field, key[: KEY_BYTES.most].hex(), remedy)
    if int.from_bytes(key[-GROUP_SUFFIX_BYTES:], "big") not in groups:
        raise InvalidArgumentError(field, key.hex(), f"group suffix must be one of {sorted(groups)}")


def check_fingerprint(field: str, fields: Mapping[str, object]) -> dict[str, str]:
    """Return a namespace's fields, bounded.

    Raises:
        InvalidArgumentError: There are none or too many, or one cannot be used.
    """
    NUM_FINGERPRINT_FIELDS.check(f"number of {field} fields", len(fields))
    values: dict[str, str] = {}
    left_bytes = FINGERPRINT_BYTES.most
    for name, value in fields.items():
        known = FINGERPRINT_FIELD.check(f"name in {field}", name)
        values[known] = Text(left_bytes).check(f"{field}.{known}", value)
        left_bytes -= len(values[known].encode())
    return values


def read_layout(field: str, fields: Mapping[str, object], groups: Sequence[Mapping[str, object]]) -> KVLayout:
    """Return a layout from its fields by name, those of its groups apart, ordered by group.

    Raises:
        InvalidArgumentError: A field is missing, unknown, out of bounds or does not fit the others.
    """
    NUM_GROUPS.check(f"number of {field}.groups", len(groups))
    numbers = _read_numbers(field, fields, _LAYOUT_FIELDS)
    read = [GroupLayout(**_read_numbers(f"{field}.groups", group, _GROUP_FIELDS)) for group in groups]
    read.sort(key=lambda group: group.group_idx)
    layout = KVLayout(groups=tuple(read), **numbers)
    if len(set(layout.group_indexes())) < len(read):
        raise InvalidArgumentError(f"{field}.groups", layout.group_indexes(), "each group may come once")
    return layout


def _read_numbers(field: str, fields: Mapping[str, object], known: Mapping[str, Whole]) -> dict[str, int]:
    if set(fields) != set(known):
        raise InvalidArgumentError(field, sorted(map(str, fields)), f"has the fields {', '.join(known)}")
    return {name: bound.check(f"{field}.{name}", fields[name]) for name, bound in known.items()}
