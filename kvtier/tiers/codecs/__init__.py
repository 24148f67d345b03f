"""Lossless codecs of chunk payloads: one contract (`base`), one file per codec, and who chooses among them."""
