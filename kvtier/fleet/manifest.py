"""What the fleet knows of one name: a manifest, as a value and as the bytes of an object. See docs/format.md."""

import base64
import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import xxhash
from pydantic import ConfigDict, TypeAdapter, ValidationError

from kvtier.core import limits
from kvtier.core.tokens import TokenIds
from kvtier.errors import InvalidArgumentError, RemoteDamagedError, RemoteNewerError
from kvtier.ledger import Labels, PromptRow
from kvtier.ledger.shared_pins import PINS as PINS
from kvtier.ledger.shared_pins import manifest_key as manifest_key
from kvtier.prompts.book import how_of

PROMPTS, KV = "prompts/", "kv/"
"""Where the objects of these kinds are; manifests are under `PINS`."""
FORMAT = 1
MAX_STORED_KV = 32
"""Entries of one manifest; beyond that the oldest go."""
MAX_WRITES = 16
"""Changes of a pin that a manifest knows; beyond that the oldest go."""
_NUMBER = limits.Whole(0, 2**60)
_TEXTS = ("model", "lora_name", "lora_path", "cache_salt", "recipe_json")


@dataclass(frozen=True, kw_only=True)
class SharedPrompt:
    """A prompt's content: an object of its own, because manifests are read often and prompts are long.

    Attributes:
        tokens: Empty for a source that no engine has rendered yet.
        recipe_json: Its source, or that it was given as tokens; may be empty then.
    """

    tokens: TokenIds = field(repr=False)
    model: str = ""
    lora_name: str = ""
    lora_path: str = ""
    cache_salt: str = field(default="", repr=False)
    recipe_json: str = field(default="", repr=False)

    @classmethod
    def of(cls, row: PromptRow) -> "SharedPrompt":
        """Return the content of a prompt."""
        return cls(tokens=row.token_ids, **{name: getattr(row, name) for name in _TEXTS})

    def to_bytes(self) -> bytes:
        """Return the object's bytes, the same for the same content."""
        fields = {name: getattr(self, name) for name in _TEXTS}
        tokens = base64.b64encode(self.tokens.to_bytes()).decode()
        return _encode({"kvtier.prompt": FORMAT, "tokens": tokens, **fields})

    @classmethod
    def from_bytes(cls, key: str, data: bytes) -> "SharedPrompt":
        """Undo `to_bytes`; raises RemoteDamagedError for bytes whose digest the key does not have, or without sense."""
        if not is_content_of(key, data):
            raise RemoteDamagedError(key, "its SHA-256 is not that of its name")
        fields = _decode(key, data, "kvtier.prompt")
        try:
            tokens = TokenIds.from_bytes(base64.b64decode(fields["tokens"], validate=True))
            limits.check_count("tokens", len(tokens), limits.MAX_TOKENS)
            texts = {name: limits.TEXT.check(name, fields[name]) for name in _TEXTS if name != "recipe_json"}
            recipe_json = limits.RECIPE.check("recipe_json", fields["recipe_json"])
        except (KeyError, ValueError, TypeError, InvalidArgumentError) as exc:
            raise RemoteDamagedError(key, str(exc)) from exc
        return cls(tokens=tokens, recipe_json=recipe_json, **texts)

    @property
    def identity(self) -> str:
        """What makes two hosts' prompts the same one: the source where there is one, else the tokens."""
        is_source = has_source(self.recipe_json)
        what = self.recipe_json if is_source else self.tokens.digest
        model = "" if is_source else self.model  # of a source, an engine fills it in
        return xxhash.xxh3_128_hexdigest("\0".join((what, model, self.lora_name, self.cache_salt)).encode())


def has_source(recipe_json: str) -> bool:
    """Return whether engines render a prompt from its recipe; that of token ids says only that they are such."""
    if '"tokens"' not in recipe_json:  # long recipes need not be read
        return bool(recipe_json)
    try:
        return bool(json.loads(recipe_json).get("kind") != "tokens")
    except (ValueError, AttributeError, RecursionError):
        return True


class _Checked:
    """What stands in manifests: of the types that the fields have, and nothing else."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)


class Content(NamedTuple):
    """Tokens (`TokenIds.digest`) in a namespace: what hosts claim. Its keys are not known before an engine binds it."""

    namespace_id: str
    tokens_digest: str


class KVId(NamedTuple):
    """Which KV: also by which keys (`digest_of`) engines look for it. They change with the weights of an adapter."""

    content: Content
    keys_digest: str


@dataclass(frozen=True, kw_only=True)
class StoredKV(_Checked):
    """The KV of a prompt in one namespace, as a bundle in the store.

    Attributes:
        key: Of the object.
        namespace_id: Whose KV it is.
        tokens_digest: Of the tokens that it is the KV of, as `TokenIds.digest`.
        num_bytes: Length of the object.
        num_chunks: In it.
        host: Who uploaded it.
        stored_unix_s: When, by the store's clock.
        keys_digest: Of the keys of its chunks, as `digest_of`.
    """

    key: str
    namespace_id: str
    tokens_digest: str
    num_bytes: int
    num_chunks: int
    host: str
    stored_unix_s: float
    keys_digest: str = ""

    @property
    def kv(self) -> KVId:
        """Which KV."""
        return KVId(Content(self.namespace_id, self.tokens_digest), self.keys_digest)


@dataclass(frozen=True, kw_only=True)
class Claim(_Checked):
    """A host computes and uploads a prompt for a namespace, and others need not, until the claim ends.

    Attributes:
        ends_unix_s: By the store's clock.
    """

    namespace_id: str
    tokens_digest: str
    host: str
    ends_unix_s: float

    @property
    def content(self) -> Content:
        """What is claimed."""
        return Content(self.namespace_id, self.tokens_digest)


@dataclass(frozen=True, kw_only=True)
class PinnedHow(_Checked):
    """How a prompt is pinned; as in `PromptRow`."""

    expires_unix_s: float = 0.0
    ttl_s: int = 0
    sliding: bool = False
    priority: int = 0
    public: bool = False
    owner: str = ""
    labels: Labels = ()

    @classmethod
    def of(cls, row: PromptRow) -> "PinnedHow":
        """Return how a prompt is pinned."""
        return cls(**how_of(row))


@dataclass(frozen=True, kw_only=True)
class OldVersion(_Checked):
    """A version that was replaced: its number, and where its content and KV are."""

    number: int
    prompt: str
    identity: str
    num_tokens: int
    stored: tuple[StoredKV, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Manifest(_Checked):
    """All that the fleet knows of one name.

    Attributes:
        pinned: The promise stands; else it is a tombstone, which names the content that was pinned last.
        incarnation: A new random text each time the name gets other content, or is pinned again.
        prompt: Key of the `SharedPrompt`. Empty: the pin ended long ago, and its content is not kept; or a host found
            that the object is gone or damaged, and one that has the content is to write it again.
        identity: Of the same.
        num_tokens: Of the same; 0: no engine has rendered it yet.
        number: Of the present version, from 1 on.
        stored: KV of the content, and claims to it.
        versions: What was replaced, by number.
        writes: Of the last changes of the pin, a random id each: a host whose answer was lost finds its own there.
        changed_by: Host that has changed the pin last; who enters KV or a claim does not.
        changed_unix_s: When this was written, by the store's clock.
    """

    name: str
    pinned: bool
    incarnation: str
    prompt: str
    identity: str
    num_tokens: int
    how: PinnedHow = field(default_factory=PinnedHow)
    created_unix_s: float = 0.0
    number: int = 1
    stored: tuple[StoredKV, ...] = ()
    claims: tuple[Claim, ...] = ()
    versions: tuple[OldVersion, ...] = ()
    writes: tuple[str, ...] = ()
    changed_by: str = ""
    changed_unix_s: float = 0.0

    @property
    def key(self) -> str:
        """Of its object."""
        return manifest_key(self.name)

    def stored_for(self, kv: KVId) -> StoredKV | None:
        """Return where KV is."""
        return next((each for each in self.stored if each.kv == kv), None)

    def claim_of(self, content: Content, now_unix_s: float) -> Claim | None:
        """Return the claim that stands."""
        return next((each for each in self.claims if each.content == content and each.ends_unix_s > now_unix_s), None)

    def with_claim(self, claim: Claim) -> "Manifest":
        """Return it with a claim, in place of others to the same content."""
        return replace(self, claims=(*self._other_claims(claim.content), claim))

    def with_stored(self, stored: StoredKV) -> "Manifest":
        """Return it with KV, in place of what was there for the same, and without claims to it."""
        others = self.without_stored(stored.kv).stored
        return replace(self, stored=(*others, stored)[-MAX_STORED_KV:], claims=self._other_claims(stored.kv.content))

    def without_stored(self, kv: KVId) -> "Manifest":
        """Return it without some KV."""
        return replace(self, stored=tuple(each for each in self.stored if each.kv != kv))

    def without_outdated(self, before_unix_s: float) -> "Manifest":
        """Return it without KV whose content was uploaded again by other keys, which happened before this time."""
        kept, outdated = list[StoredKV](), set[Content]()
        for each in reversed(self.stored):  # the last one is the newest
            if each.kv.content not in outdated:
                kept.append(each)
            if each.stored_unix_s < before_unix_s:
                outdated.add(each.kv.content)
        return replace(self, stored=tuple(reversed(kept)))

    def _other_claims(self, content: Content) -> tuple[Claim, ...]:
        return tuple(each for each in self.claims if each.content != content)

    def with_write(self) -> "Manifest":
        """Return it as one more change of the pin."""
        return replace(self, writes=(*self.writes, secrets.token_hex(8))[-MAX_WRITES:])

    def references(self) -> set[str]:
        """Return the keys of all objects that it names."""
        stored = [*self.stored, *(kv for each in self.versions for kv in each.stored)]
        named = {self.prompt, *(each.prompt for each in self.versions), *(each.key for each in stored)}
        return named - {""}

    def to_bytes(self) -> bytes:
        """Return the object's bytes."""
        fields = asdict(self)
        return _encode({"kvtier.manifest": FORMAT, "xxh3_64": _checksum(fields), **fields})

    @classmethod
    def from_bytes(cls, key: str, data: bytes) -> "Manifest":
        """Undo `to_bytes`.

        Raises:
            RemoteNewerError: These bytes are as they were written, and say what this kvtier cannot read.
            RemoteDamagedError: They are not a manifest, or not that of this key.
        """
        fields = _decode(key, data, "kvtier.manifest")
        if fields.pop("xxh3_64", None) != _checksum(fields):
            raise RemoteDamagedError(key, "its checksum differs")
        try:
            manifest = _CHECKED.validate_python(fields)
            _check_bounds(manifest)
        except (ValidationError, InvalidArgumentError, RecursionError) as exc:
            raise RemoteNewerError(key, str(exc)) from exc
        if manifest.key != key:
            raise RemoteDamagedError(key, f"it is that of {manifest.name!r}")
        return manifest


def new_prompt_key(data: bytes) -> str:
    """Return a key for a prompt's content that was never used."""
    return f"{PROMPTS}{hashlib.sha256(data).hexdigest()}-{secrets.token_hex(8)}.json"


def is_content_of(key: str, data: bytes) -> bool:
    """Return whether bytes are those that were written under a prompt's key."""
    return key.startswith(f"{PROMPTS}{hashlib.sha256(data).hexdigest()}-")


def _encode(fields: Mapping[str, Any]) -> bytes:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="surrogatepass")  # others may write half a character


def _checksum(fields: Mapping[str, Any]) -> str:
    return f"{xxhash.xxh3_64_intdigest(_encode(fields)):016x}"


def _decode(key: str, data: bytes, kind: str) -> dict[str, Any]:
    try:
        fields = json.loads(data)
        version = fields.pop(kind)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as exc:
        raise RemoteDamagedError(key, f"it is no {kind.partition('.')[2]} ({exc})") from exc
    if version != FORMAT:
        is_newer = isinstance(version, int) and version > FORMAT
        problem = f"its format version is {version}, this kvtier knows {FORMAT}"
        raise (RemoteNewerError if is_newer else RemoteDamagedError)(key, problem)
    return dict(fields)


_CHECKED = TypeAdapter(Manifest)


def _check_bounds(manifest: Manifest) -> None:
    """Raise InvalidArgumentError for what is of the right type and cannot be."""
    limits.check_name(manifest.name)
    limits.PRIORITY.check("priority", manifest.how.priority)
    limits.TTL_S.check("ttl_s", manifest.how.ttl_s)
    limits.check_operators_owner("owner", manifest.how.owner)
    limits.check_labels("labels", dict(manifest.how.labels))
    for stored in (*manifest.stored, *(kv for each in manifest.versions for kv in each.stored)):
        if not stored.key.startswith(f"{KV}{stored.namespace_id}/"):
            raise InvalidArgumentError("stored.key", stored.key, "is not one of its namespace")
        _NUMBER.check("stored.num_bytes", stored.num_bytes)
        _NUMBER.check("stored.num_chunks", stored.num_chunks)
