"""What a scratch file holds, encrypted with a key that only this process has, and only in memory."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import CipherContext

_BLOCK_BYTES = 16


class ScratchCipher:
    """AES-256-CTR by offset, so that any part can be written and read. A file that is written again gets a new one.

    It keeps secrets and finds no change: the file is unlinked with its process, and what it holds has digests.
    """

    def __init__(self) -> None:
        self._key = os.urandom(32)

    def apply(self, data: bytes | memoryview, offset: int) -> bytes:
        """Encrypt what goes to this offset of the file, or decrypt what came from there."""
        skipped = offset % _BLOCK_BYTES
        context = self._context(offset // _BLOCK_BYTES)
        if skipped:
            context.update(bytes(skipped))
        return context.update(data)

    def _context(self, first_block: int) -> "CipherContext":
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES256
        from cryptography.hazmat.primitives.ciphers.modes import CTR

        return Cipher(AES256(self._key), CTR(first_block.to_bytes(_BLOCK_BYTES, "big"))).encryptor()
