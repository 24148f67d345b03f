"""A small file that is sealed whole, or plain as before: which, its first bytes say.

0    magic `KVTSEALV`, the key's name (32 bytes, zeros after it)
40   32 random bytes, ciphertext, a tag of 16 bytes
"""

from kvtier.sealing.aead import TAG_BYTES, SealBrokenError
from kvtier.sealing.key_ring import SALT_BYTES, KeyRing, find_key

_MAGIC = b"KVTSEALV"
_HEAD_BYTES = len(_MAGIC) + 32
ADDED_BYTES = _HEAD_BYTES + SALT_BYTES + TAG_BYTES


def seal_file(ring: KeyRing | None, content: bytes, associated: bytes) -> bytes:
    """Return a file's content sealed, at most `ADDED_BYTES` longer; without a ring as it is."""
    if ring is None:
        return content
    head = _MAGIC + ring.writing.name.encode().ljust(32, b"\0")
    return head + ring.writing.seal_value(content, head + associated)


def is_sealed(beginning: bytes) -> bool:
    """Return whether a file is sealed, by its first `ADDED_BYTES` or more."""
    return beginning.startswith(_MAGIC)


def open_file(ring: KeyRing | None, content: bytes, associated: bytes, what: str) -> bytes:
    """Undo `seal_file`; a plain file's content is returned as it is. `what` it is, for messages.

    Raises:
        KeyMissingError: The ring lacks the key.
        SealBrokenError: It is not what was sealed, or not as this file.
    """
    if not is_sealed(content):
        return content
    head = content[:_HEAD_BYTES]
    try:
        name = head[len(_MAGIC) :].rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError as exc:
        raise SealBrokenError(f"the head of {what} is damaged") from exc
    return find_key(ring, name, what).open_value(content[_HEAD_BYTES:], head + associated)
