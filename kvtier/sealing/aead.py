"""AES-256-GCM, by the package `cryptography`: imported where a key is used, so that no one else needs it."""

from typing import Protocol, cast

from kvtier.errors import KvtierError

TAG_BYTES = 16
NONCE_BYTES = 12
KEY_BYTES = 32

Buffer = bytes | bytearray | memoryview


class SealBrokenError(KvtierError):
    """Sealed bytes are not what was written, or not in the place for which they were sealed."""


class Aead(Protocol):
    """What is used of `cryptography`'s AESGCM. It releases Python's lock while it works on more than some bytes."""

    def encrypt(self, nonce: Buffer, data: Buffer, associated_data: Buffer | None) -> bytes: ...

    def decrypt_into(self, nonce: Buffer, data: Buffer, associated_data: Buffer | None, buf: Buffer) -> int: ...


def aead_of(key: bytes) -> Aead:
    """Return the cipher of a key of 32 bytes; about 2 us."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return cast(Aead, AESGCM(key))


def decrypt_into(aead: Aead, nonce: bytes, sealed: Buffer, associated: bytes, into: Buffer) -> None:
    """Open ciphertext and tag into another buffer, which the plaintext fills.

    Raises:
        SealBrokenError: The bytes are not what was sealed under this key, nonce and associated data.
    """
    if len(sealed) < TAG_BYTES or len(into) != len(sealed) - TAG_BYTES:
        raise SealBrokenError(f"{len(sealed)} sealed bytes cannot hold {len(into)}")
    try:
        aead.decrypt_into(nonce, sealed, associated, into)
    except Exception as exc:
        from cryptography.exceptions import InvalidTag  # here: the import statement takes 2 us of each chunk

        if not isinstance(exc, InvalidTag):
            raise
        raise SealBrokenError("the bytes are not what was sealed") from exc
