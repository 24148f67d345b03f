"""Lossless codecs of chunk payloads: one contract (`base`), its implementations, and who chooses among them."""

from kvtier.disk.codecs.base import Codec, CodecError
from kvtier.disk.codecs.choose import CodecChooser, UnknownCodecError, codec_by_name, default_codecs

__all__ = ["Codec", "CodecChooser", "CodecError", "UnknownCodecError", "codec_by_name", "default_codecs"]
