"""A long run of bytes in sealed segments, of which any part can be opened: a bundle's file, an object of a fleet.

    0     head: magic `KVTSEAL1`, the key's name (32 bytes, zeros after it), 32 random bytes, length of a segment
          (uint32, little endian), 4 zero bytes
    80    segments: ciphertext of 1 MiB, the last one shorter, and a tag of 16 bytes each

A segment is bound to its number and to whether it is the last: none can be moved, left out or added (docs/format.md).
"""

import os
import struct
from collections.abc import Iterable, Iterator

from kvtier.sealing.aead import NONCE_BYTES, TAG_BYTES, Aead, SealBrokenError, decrypt_into
from kvtier.sealing.key_ring import SALT_BYTES, Key, KeyRing, find_key

MAGIC = b"KVTSEAL1"
SEGMENT_BYTES = 1024**2
_HEAD = struct.Struct(f"<8s32s{SALT_BYTES}sI4x")
HEAD_BYTES = _HEAD.size
_SEALED_BYTES = SEGMENT_BYTES + TAG_BYTES


def sealed_length(num_bytes: int) -> int:
    """Return the length of the stream that holds this many bytes."""
    return HEAD_BYTES + num_bytes + TAG_BYTES * max(1, -(-num_bytes // SEGMENT_BYTES))


def plain_length(num_sealed: int) -> int:
    """Return how many bytes a stream of this length holds.

    Raises:
        SealBrokenError: No stream has this length.
    """
    body = num_sealed - HEAD_BYTES
    num_segments = -(-body // _SEALED_BYTES)
    num_bytes = body - TAG_BYTES * num_segments
    if num_segments < 1 or num_bytes < 0 or sealed_length(num_bytes) != num_sealed:
        raise SealBrokenError(f"a sealed stream cannot have {num_sealed} bytes: it is cut short, or is none")
    return num_bytes


def is_sealed(start: bytes) -> bool:
    """Say whether bytes are the beginning of a sealed stream."""
    return start[: len(MAGIC)] == MAGIC


class StreamSealer:
    """Seals one stream, in order: `add` what comes, then `end`.

    Attributes:
        head: The first bytes of the stream.
    """

    def __init__(self, key: Key) -> None:
        salt = os.urandom(SALT_BYTES)
        self.head = _HEAD.pack(MAGIC, key.name.encode(), salt, SEGMENT_BYTES)
        self._aead, self._number, self._left = key.of_stream(salt), 0, bytearray()

    def add(self, data: bytes) -> bytes:
        """Take more bytes; return what is ready, maybe nothing: a segment waits until more follows it."""
        self._left += data
        ready = []
        while len(self._left) > SEGMENT_BYTES:
            ready.append(self._seal(bytes(self._left[:SEGMENT_BYTES]), is_last=False))
            del self._left[:SEGMENT_BYTES]
        return b"".join(ready)

    def end(self) -> bytes:
        """Return the last segment."""
        return self._seal(bytes(self._left), is_last=True)

    def _seal(self, data: bytes, *, is_last: bool) -> bytes:
        nonce, self._number = _nonce(self._number, is_last), self._number + 1
        return self._aead.encrypt(nonce, data, self.head)


class StreamOpener:
    """Opens segments of one stream, any of them, in any order.

    Args:
        head: The first `HEAD_BYTES` of the stream.
        num_sealed: Its length.
        ring: Has the key.
        what: What it is, for messages.

    Attributes:
        num_bytes: How many bytes it holds.

    Raises:
        KeyMissingError: The ring lacks the key.
        SealBrokenError: It is no sealed stream.
    """

    def __init__(self, head: bytes, num_sealed: int, ring: KeyRing | None, what: str) -> None:
        name, salt = _read_head(head)
        self.num_bytes = plain_length(num_sealed)
        self._head = head
        self._aead: Aead = find_key(ring, name, what).of_stream(salt)
        self._last = max(0, -(-self.num_bytes // SEGMENT_BYTES) - 1)

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Return which bytes of the stream, whole segments, hold those from `start` up to `end`; none for none."""
        end = min(end, self.num_bytes)
        if start >= end:
            return HEAD_BYTES, HEAD_BYTES
        first, last = start // SEGMENT_BYTES, (end - 1) // SEGMENT_BYTES
        return HEAD_BYTES + first * _SEALED_BYTES, min(
            HEAD_BYTES + (last + 1) * _SEALED_BYTES, sealed_length(self.num_bytes)
        )

    def open(self, sealed: bytes, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to `end`, given those of `span`.

        Raises:
            SealBrokenError: They are not what was sealed.
        """
        end = min(end, self.num_bytes)
        if start >= end:
            return b""
        first, view = start // SEGMENT_BYTES, memoryview(sealed)
        plain = bytearray(
            min((((end - 1) // SEGMENT_BYTES) + 1) * SEGMENT_BYTES, self.num_bytes) - first * SEGMENT_BYTES
        )
        into = memoryview(plain)
        for offset in range(0, len(plain), SEGMENT_BYTES):
            number = first + offset // SEGMENT_BYTES
            begin, size = offset + TAG_BYTES * (number - first), min(SEGMENT_BYTES, len(plain) - offset)
            self._open(number, view[begin : begin + size + TAG_BYTES], into[offset : offset + size])
        return bytes(into[start - first * SEGMENT_BYTES : end - first * SEGMENT_BYTES])

    def _open(self, number: int, sealed: memoryview, into: memoryview) -> None:
        decrypt_into(self._aead, _nonce(number, number == self._last), sealed, self._head, into)


def opened_pieces(stream: Iterable[bytes], ring: KeyRing | None, what: str) -> Iterator[bytes]:
    """Yield the bytes of a sealed stream that comes in order, in pieces of any length; nothing is yielded unverified.

    Raises:
        KeyMissingError: The ring lacks the key.
        SealBrokenError: It is not what was sealed, is cut short, or something follows its end.
    """
    left, aead, number, head = bytearray(), None, 0, b""
    for data in stream:
        left += data
        if aead is None and len(left) >= HEAD_BYTES:
            head = bytes(left[:HEAD_BYTES])
            name, salt = _read_head(head)
            aead = find_key(ring, name, what).of_stream(salt)
            del left[:HEAD_BYTES]
        while aead is not None and len(left) > _SEALED_BYTES:
            yield _opened(aead, head, number, bytes(left[:_SEALED_BYTES]), is_last=False)
            number += 1
            del left[:_SEALED_BYTES]
    if aead is None:
        raise SealBrokenError("it is no sealed stream of kvtier, or cut short")
    yield _opened(aead, head, number, bytes(left), is_last=True)


def _opened(aead: Aead, head: bytes, number: int, sealed: bytes, *, is_last: bool) -> bytes:
    plain = bytearray(max(0, len(sealed) - TAG_BYTES))
    decrypt_into(aead, _nonce(number, is_last), sealed, head, plain)
    return bytes(plain)


def _read_head(head: bytes) -> tuple[str, bytes]:
    if len(head) != HEAD_BYTES or not is_sealed(head):
        raise SealBrokenError("it is no sealed stream of kvtier")
    _, name, salt, segment_bytes = _HEAD.unpack(head)
    if segment_bytes != SEGMENT_BYTES or head[-4:] != bytes(4):
        raise SealBrokenError("its head is damaged, or a newer kvtier wrote it")
    try:
        return name.rstrip(b"\0").decode("ascii"), salt
    except UnicodeDecodeError as exc:
        raise SealBrokenError("its head is damaged") from exc


def _nonce(number: int, is_last: bool) -> bytes:
    return number.to_bytes(NONCE_BYTES - 1, "big") + bytes([is_last])
