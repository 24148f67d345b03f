"""A manifest survives its bytes; whatever else is in its place is refused by name, and never ends the sync."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvtier.core import limits
from kvtier.core.tokens import TokenIds
from kvtier.errors import RemoteDamagedError, RemoteNewerError
from kvtier.fleet import manifest as manifests
from kvtier.fleet.manifest import (
    Claim,
    Manifest,
    OldVersion,
    PinnedHow,
    SharedPrompt,
    StoredKV,
    has_source,
    new_prompt_key,
)
from kvtier.fleet.merge import LocalPin, merge
from kvtier.library.rendering.recipe import Recipe, SourceKind
from kvtier.prompts.book import RequestedPin
from kvtier.remote.base import MAX_SMALL_BYTES
from kvtier.sealing.sealed_stream import sealed_length

STORED = StoredKV(
    key="kv/ab/x.safetensors",
    namespace_id="ab",
    tokens_digest="cd",
    num_bytes=10,
    num_chunks=2,
    host="a",
    stored_unix_s=1.5,
    keys_digest="ef",
)
WHOLE = Manifest(
    name="support",
    pinned=True,
    incarnation="1234",
    prompt="prompts/x.json",
    identity="ef",
    num_tokens=3,
    how=PinnedHow(expires_unix_s=2.5, ttl_s=60, sliding=True, priority=-3, owner="team", labels=(("a", "b"),)),
    created_unix_s=0.5,
    number=2,
    stored=(STORED,),
    claims=(Claim(namespace_id="ab", tokens_digest="cd", host="b", ends_unix_s=9.0),),
    versions=(OldVersion(number=1, prompt="prompts/y.json", identity="01", num_tokens=2, stored=(STORED,)),),
    changed_by="a",
    changed_unix_s=3.0,
)
ODD: tuple[Any, ...] = (None, True, -1, 1.5, "", "x", "\ud800", [], {}, [[]], {"a": 1}, 10**400, float("inf"))


def sealed(fields: dict[str, Any]) -> bytes:
    """Return the bytes of fields, with the checksum that belongs to them."""
    return manifests._encode({"kvtier.manifest": 1, "xxh3_64": manifests._checksum(fields), **fields})


def fields_of(manifest: Manifest) -> dict[str, Any]:
    fields = json.loads(manifest.to_bytes())
    return {name: value for name, value in fields.items() if name not in ("kvtier.manifest", "xxh3_64")}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def use(manifest: Manifest) -> None:
    """Do with a manifest what hosts do: none of it may fail, or a sync would end for good."""
    mine = LocalPin(pinned=True, identity="ef", num_tokens=3, how=replace(WHOLE.how, expires_unix_s=7.0))
    for local in (mine, replace(mine, pinned=False), replace(mine, identity="other")):
        merge("support", WHOLE, local, manifest, 5.0)
    assert all(isinstance(key, str) for key in manifest.references())
    manifest.claim_of(STORED.kv.content, 1.0)
    manifest.with_stored(STORED).without_outdated(5.0)
    assert manifest.changed_unix_s < 1e300
    RequestedPin(name=manifest.name, tokens=(1,), ttl_s=manifest.how.ttl_s, labels=dict(manifest.how.labels))


def test_a_manifest_survives_its_bytes() -> None:
    for manifest in (WHOLE, replace(WHOLE, pinned=False, prompt="", stored=(), claims=(), versions=())):
        assert Manifest.from_bytes(manifest.key, manifest.to_bytes()) == manifest


def test_kv_by_other_keys_is_other_kv_and_the_older_goes_after_a_time() -> None:
    old, other = STORED, replace(STORED, namespace_id="xy")
    new, newest = (replace(STORED, keys_digest=keys, stored_unix_s=at) for keys, at in (("01", 10.0), ("02", 20.0)))
    manifest = replace(WHOLE, stored=(old, other))
    for each in (new, newest):
        manifest = manifest.with_stored(each)
    assert manifest.stored == (old, other, new, newest)
    assert (manifest.stored_for(new.kv), manifest.stored_for(STORED.kv)) == (new, old)
    assert manifest.claims == (), "who has claimed it need not compute it"
    assert manifest.without_outdated(10.0) == manifest
    assert manifest.without_outdated(11.0).stored == (other, new, newest)
    assert manifest.without_outdated(21.0).stored == (other, newest)
    assert manifest.without_stored(new.kv).stored == (old, other, newest)


def test_a_manifest_that_is_whole_and_of_a_newer_kvtier_is_known_from_a_damaged_one() -> None:
    fields = fields_of(WHOLE)
    for data in (sealed(fields | {"weather": "fine"}), b'{"kvtier.manifest":2}'):
        with pytest.raises(RemoteNewerError, match="upgrade kvtier"):
            Manifest.from_bytes(WHOLE.key, data)
    for data in (sealed(fields)[:-1], b'{"kvtier.manifest":1}', b'{"kvtier.manifest":"2"}', b"{}"):
        with pytest.raises(RemoteDamagedError, match="not what was written"):
            Manifest.from_bytes(WHOLE.key, data)


def test_every_prompt_within_the_bounds_can_be_read_by_other_hosts() -> None:
    """They refused objects above 16 MiB, and hosts wrote longer ones: a Cyrillic letter took six bytes."""
    longest = SharedPrompt(
        tokens=TokenIds([2**32 - 1] * limits.MAX_TOKENS),
        recipe_json="\x01" * limits.RECIPE.max_bytes,  # six bytes each in JSON
        **dict.fromkeys(("model", "lora_name", "lora_path", "cache_salt"), "\x01" * limits.TEXT.max_bytes),
    )
    data = longest.to_bytes()
    assert sealed_length(len(data)) < MAX_SMALL_BYTES
    assert SharedPrompt.from_bytes(new_prompt_key(data), data) == longest
    letters = SharedPrompt(tokens=TokenIds(), recipe_json="ж" * 10_000)
    data = letters.to_bytes()
    assert len(data) < 2 * 10_000 + 200
    assert SharedPrompt.from_bytes(new_prompt_key(data), data) == letters


def test_every_flipped_bit_is_refused() -> None:
    data = WHOLE.to_bytes()
    for place in range(len(data)):
        changed = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        with pytest.raises(RemoteDamagedError):
            Manifest.from_bytes(WHOLE.key, changed)


@pytest.mark.parametrize("path", list(places(fields_of(WHOLE))), ids=str)
def test_a_field_of_any_kind_is_read_or_refused_by_name(path: tuple[Any, ...]) -> None:
    """With the right checksum: a store that others write to may say anything."""
    for odd in ODD:
        fields = fields_of(WHOLE)
        at: Any = fields
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = odd
        with suppress(RemoteDamagedError):
            read = Manifest.from_bytes(WHOLE.key, sealed(fields))
            assert Manifest.from_bytes(WHOLE.key, read.to_bytes()) == read, "what is read can be written"
            use(read)


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.text(), st.lists).map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteDamagedError):
        Manifest.from_bytes(WHOLE.key, data)
    with pytest.raises(RemoteDamagedError):
        SharedPrompt.from_bytes(new_prompt_key(data), data)


def test_prompts_that_are_given_as_tokens_are_the_same_if_their_tokens_are() -> None:
    """The command line stores a recipe with them too, which says only that they are tokens: all were one prompt, so a
    fleet lost one of two that hosts pinned under the same name."""
    recipe_json = Recipe(kind=SourceKind.TOKENS).to_json()
    one, other = (SharedPrompt(tokens=TokenIds(range(n)), recipe_json=recipe_json) for n in (5, 6))
    assert one.identity != other.identity
    assert one.identity == SharedPrompt(tokens=TokenIds(range(5))).identity
    assert not has_source(recipe_json)
    assert not has_source("")


@pytest.mark.parametrize("content", ["you are kind", 'say "tokens"', '{"kind": "tokens"}'])
def test_prompts_with_a_source_are_the_same_if_their_sources_are(content: str) -> None:
    recipe_json = Recipe(kind=SourceKind.SYSTEM, content=content).to_json()
    one, other = (SharedPrompt(tokens=TokenIds(range(n)), recipe_json=recipe_json) for n in (5, 6))
    assert one.identity == other.identity
    assert has_source(recipe_json)
    assert all(has_source(odd) for odd in ('"tokens"', '{"tokens": 1}', '{"tokens"', '["tokens"]'))


@pytest.mark.parametrize("name", ["tokens", "model", "recipe_json", "cache_salt"])
def test_a_prompt_with_a_field_of_any_kind_is_read_or_refused(name: str) -> None:
    whole = SharedPrompt(tokens=TokenIds(range(5)), model="m", recipe_json="{}")
    key = new_prompt_key(whole.to_bytes())
    assert SharedPrompt.from_bytes(key, whole.to_bytes()) == whole
    for odd in ODD:
        data = manifests._encode(json.loads(whole.to_bytes()) | {name: odd})
        with suppress(RemoteDamagedError):
            SharedPrompt.from_bytes(new_prompt_key(data), data)
