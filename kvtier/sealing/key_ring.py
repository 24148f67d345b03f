"""The keys that a daemon has, and what each seals: chunks of packs, and small values."""

import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier.errors import KeyMissingError
from kvtier.sealing.aead import TAG_BYTES, Aead, SealBrokenError, aead_of, decrypt_into

SALT_BYTES = 32
_ONE_USE = bytes(12)
"""Nonce of a key that seals one thing."""


@dataclass(frozen=True)
class Key:
    """A key of 32 bytes; it is never shown.

    Attributes:
        key_id: What people call it.
        name: What files call it: the id and a fingerprint, so that two keys of one id are two.
    """

    key_id: str
    secret: bytes = field(repr=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.key_id}.{self._derived(b'kvtier key name')[:4].hex()}")

    def _derived(self, purpose: bytes) -> bytes:
        return hmac.digest(self.secret, purpose, "sha256")

    def of_pack(self, pack_id: str) -> Aead:
        """Return the cipher of one pack."""
        return aead_of(self._derived(b"kvtier pack 1\0" + bytes.fromhex(pack_id)))

    def of_stream(self, salt: bytes) -> Aead:
        """Return the cipher of one stream."""
        return aead_of(self._derived(b"kvtier stream 1\0" + salt))

    def seal_value(self, value: bytes, associated: bytes) -> bytes:
        """Return a small value sealed, 48 bytes longer; `associated` says what it is, and whose."""
        salt = os.urandom(SALT_BYTES)
        return salt + self._of_value(salt).encrypt(_ONE_USE, value, associated)

    def open_value(self, sealed: bytes, associated: bytes) -> bytes:
        """Undo `seal_value`; raises SealBrokenError for anything else, or with another `associated`."""
        if len(sealed) < SALT_BYTES + TAG_BYTES:
            raise SealBrokenError(f"{len(sealed)} bytes are no sealed value")
        salt, body = sealed[:SALT_BYTES], sealed[SALT_BYTES:]
        value = bytearray(len(body) - TAG_BYTES)
        decrypt_into(self._of_value(salt), _ONE_USE, body, associated, value)
        return bytes(value)

    def _of_value(self, salt: bytes) -> Aead:
        return aead_of(self._derived(b"kvtier value 1\0" + salt))


class KeyRing:
    """The keys of one file: the first writes, all read.

    Attributes:
        writing: The first.
        by_name: All of them.
        path: The file, as messages name it.
    """

    def __init__(self, keys: list[Key], path: str = "the key file") -> None:
        self.writing = keys[0]
        self.by_name: Mapping[str, Key] = {key.name: key for key in keys}
        self.path = path

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(self.by_name)})"

    def find(self, name: str, what: str) -> Key:
        """Return a key; `what` is sealed with it, for the message.

        Raises:
            KeyMissingError: There is none of this name.
        """
        key = self.by_name.get(name)
        if key is None:
            raise KeyMissingError(what, name, self.path)
        return key


def find_key(ring: KeyRing | None, name: str, what: str) -> Key:
    """Return a key of a ring that may be none; raises as `KeyRing.find`."""
    if ring is None:
        raise KeyMissingError(what, name, "")
    return ring.find(name, what)
