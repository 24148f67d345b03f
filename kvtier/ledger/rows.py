"""What the ledger keeps, as values, and how each is coded in its columns and copies."""

import dataclasses
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

import xxhash

from kvtier.core.layout import ChunkKey, GroupLayout, KVLayout
from kvtier.core.stored import PackRecord
from kvtier.core.tokens import TokenIds
from kvtier.errors import InvalidArgumentError
from kvtier.ledger.stored_packs import StoredPacks

Origin = Literal["named", "auto", "request", "replacement"]
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class NamespaceRow:
    """One namespace, first opened at `created_unix_s`, last at `seen_unix_s`.

    Attributes:
        namespace_id: Digest of the fingerprint.
        model: For people.
        fingerprint: Everything that makes KV bytes interchangeable.
        layout: Of its arena rows and packs.
    """

    namespace_id: str
    model: str
    fingerprint: Mapping[str, str]
    layout: KVLayout
    created_unix_s: float
    seen_unix_s: float


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One prompt. The order of the fields is that of the columns, and so of what the row's checksum covers.

    Attributes:
        name: Unique.
        pin_id: Unique; bindings refer to it.
        pinned: The promise stands.
        tokens: Token ids, empty for a recipe that is not rendered yet; any sequence may be given.
        model: Empty for any model; `lora_name`, `lora_path` and `cache_salt` are empty for none.
        recipe_json: How the tokens came to be; opaque.
        created_unix_s: When it was first pinned.
        expires_unix_s: When the pin ends by itself; 0: never.
        priority: The higher, the more important; 0 for one that is not pinned.
        revision: As the ledger gave it when it wrote the row; 0 for a row that was not read from it.
        origin: Where the pin comes from: an operator (`named`), found in requests (`auto`), a request (`request`), an
            operator who has it replace the pin that its name says (`replacement`).
        owner: Whose prompt it is, as an operator wrote it, or whose request it was, a digest; may be empty.
        public: Requests with any cache salt may be restored its chunks; it has none itself.
        labels: What operators select prompts by: key and value, in the order of keys.
        ttl_s: Time to live as it was given last, in seconds; 0: none, or given before ledgers kept it.
        sliding: It begins again at each use.
    """

    name: str
    pin_id: str
    pinned: bool
    tokens: Sequence[int] = field(repr=False)
    model: str
    lora_name: str
    lora_path: str
    cache_salt: str = field(repr=False)
    recipe_json: str = field(repr=False)
    created_unix_s: float
    expires_unix_s: float
    priority: int = 0
    revision: int = field(default=0, compare=False)
    origin: Origin = "named"
    owner: str = ""
    public: bool = False
    labels: Labels = ()
    ttl_s: int = 0
    sliding: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _token_ids(self.tokens))

    @property
    def source_digest(self) -> str:
        """XXH3-128 of the recipe in hex; empty without one."""
        return xxhash.xxh3_128_hexdigest(self.recipe_json.encode()) if self.recipe_json else ""

    @property
    def token_ids(self) -> TokenIds:
        """The tokens, as they are kept."""
        assert isinstance(self.tokens, TokenIds)
        return self.tokens


@dataclass(frozen=True, kw_only=True)
class BindingRow:
    """The chunks by which one namespace recognizes a prompt.

    Attributes:
        pin_id: The prompt.
        namespace_id: The namespace.
        keys: Every reachable chunk, in the engine's order; all keys of one length.
        covered_tokens: Tokens of the prompt that whole chunks cover.
        revision: As in `PromptRow`.
    """

    pin_id: str
    namespace_id: str
    keys: tuple[ChunkKey, ...]
    covered_tokens: int
    revision: int = field(default=0, compare=False)


@dataclass(frozen=True, kw_only=True)
class LedgerSnapshot:
    """All that the ledger holds: namespaces from the oldest, prompts by name, packs with their chunks.

    Attributes:
        removed_packs: Packs whose rows were dropped on purpose, and whose files may still exist.
    """

    namespaces: tuple[NamespaceRow, ...] = ()
    prompts: tuple[PromptRow, ...] = ()
    bindings: tuple[BindingRow, ...] = ()
    stored: StoredPacks = field(default_factory=StoredPacks)
    removed_packs: Set[str] = frozenset()

    @property
    def packs(self) -> dict[str, PackRecord]:
        """Packs by id, with an object for each chunk."""
        return self.stored.records


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """Return tokens as little-endian uint32; raises InvalidArgumentError for one that does not fit."""
    return _token_ids(tokens).to_bytes()


def encode_labels(labels: Labels) -> str:
    """Return labels as JSON."""
    return json.dumps(labels, separators=(",", ":"))


def decode_labels(text: str) -> Labels:
    """Undo `encode_labels`; raises ValueError or TypeError for other text."""
    return tuple((str(key), str(value)) for key, value in json.loads(text))


def _token_ids(tokens: Sequence[int]) -> TokenIds:
    try:
        return TokenIds.of(tokens)
    except OverflowError as exc:
        raise InvalidArgumentError("tokens", f"{min(tokens)}..{max(tokens)}", "token ids have 32 bits") from exc


def encode_keys(keys: tuple[ChunkKey, ...]) -> tuple[int, bytes]:
    """Return the keys' common length (0 without keys) and the keys, one after the other.

    Raises:
        InvalidArgumentError: The keys differ in length.
    """
    key_bytes = len(keys[0]) if keys else 0
    if any(len(key) != key_bytes for key in keys):
        lengths = sorted({len(key) for key in keys})
        raise InvalidArgumentError("keys", f"lengths {lengths}", "all chunk keys of a binding have one length")
    return key_bytes, b"".join(keys)


def decode_keys(key_bytes: int, blob: bytes) -> tuple[ChunkKey, ...]:
    """Undo `encode_keys`; raises ValueError for a blob that is no whole number of keys."""
    if not blob:
        return ()
    if key_bytes <= 0 or len(blob) % key_bytes:
        raise ValueError(f"{len(blob)} bytes are no whole number of keys of {key_bytes} bytes")
    return tuple(blob[start : start + key_bytes] for start in range(0, len(blob), key_bytes))


def encode_layout(layout: KVLayout) -> str:
    """Return a layout as JSON."""
    return json.dumps(dataclasses.asdict(layout), separators=(",", ":"))


def decode_layout(text: str) -> KVLayout:
    """Undo `encode_layout`; raises ValueError, TypeError, KeyError or InvalidArgumentError for other text."""
    fields = json.loads(text)
    groups = tuple(GroupLayout(**group) for group in fields.pop("groups"))
    return KVLayout(groups=groups, **fields)
