"""Codecs on real KV of a small trained Llama, beside zstd, blosc2 and the order-0 entropy bound.

usage: python -m benchmarks.codecs [--steps 300] [--chunks 12] [--blocks 8] [--rounds 15]

GB/s are payload bytes by CPU time of the one thread that works. Codecs and data sets take turns in every round, so that
drift of the machine affects all of them. The bound: each byte position of a value is coded by the frequencies of its
bytes in that chunk, and the table of frequencies costs nothing. A chunk is `--blocks` blocks of 32 tokens, each
(layers, 2, tokens, heads, dim).
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from benchmarks.harness.trained_model import prompt_kv, trained_model
from benchmarks.measuring.machine import machine_line, spread
from kvtier.disk.codecs import Codec, CodecChooser, codec_by_name, default_codecs
from kvtier.disk.codecs.planes import HUFFMAN_ONLY
from kvtier.disk.codecs.split import Split16Codec, Split32Codec
from kvtier.disk.codecs.words import NUMPY, WordKernels, compile_kernels, use_kernels
from kvtier.disk.codecs.zstd import ZstdCodec

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Candidate:
    """What is measured: payload to stored bytes, and back into a buffer."""

    name: str
    encode: Callable[[Bytes], Sequence[memoryview]]
    decode: Callable[[bytes, Bytes], object]


@dataclass
class Row:
    """One candidate on one data set."""

    stored: list[bytes] = field(default_factory=list)
    encode_gb_s: list[float] = field(default_factory=list)
    decode_gb_s: list[float] = field(default_factory=list)


def main() -> None:
    """Train or load the model, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--chunks", type=int, default=12)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    data, loss = _data_sets(options.steps, options.chunks, options.blocks)
    candidates = {name: _candidates(item_bytes) for name, (item_bytes, _) in data.items()}
    rows = _measure(data, candidates, options.rounds)
    versions = f"numpy {np.__version__}, zstd {'.'.join(map(str, zstandard.ZSTD_VERSION))}"
    print(machine_line() + ", " + versions)
    print(f"{options.steps} training steps, loss {loss:.2f} nats a token (undertrained); {options.rounds} rounds")
    for name, (item_bytes, chunks) in data.items():
        _print_table(name, item_bytes, chunks, rows[name])
    _print_skipped()


def _data_sets(steps: int, num_chunks: int, num_blocks: int) -> tuple[dict[str, tuple[int, list[Bytes]]], float]:
    model, loss = trained_model(steps)
    single = prompt_kv(model, torch.float32, 2)
    half = prompt_kv(model, torch.bfloat16, 2)
    tensors = {
        "bfloat16": (2, half),
        "float32": (4, single),
        "float16 (cast)": (2, [block.to(torch.float16) for block in single]),
        "fp8 e4m3 (cast)": (1, [block.to(torch.float8_e4m3fn) for block in half]),
    }
    chunks = {name: (width, _chunks(blocks, num_chunks, num_blocks)) for name, (width, blocks) in tensors.items()}
    return chunks, loss


def _chunks(blocks: Sequence[torch.Tensor], num_chunks: int, num_blocks: int) -> list[Bytes]:
    """Return chunks spread over all blocks."""
    flat = [block.reshape(-1).view(torch.uint8).numpy() for block in blocks]
    starts = np.linspace(0, len(flat) - num_blocks, num_chunks).astype(int)
    return [np.concatenate(flat[start : start + num_blocks]) for start in starts]


def _candidates(item_bytes: int) -> list[Candidate]:
    chooser = CodecChooser(default_codecs())
    huffman = zstandard.ZstdCompressor(compression_params=HUFFMAN_ONLY)
    split: dict[int, list[Codec]] = {2: [Split16Codec()], 4: [Split32Codec(), Split16Codec()]}
    found = [_of_codec(codec.name, codec) for codec in split.get(item_bytes, [])]
    if importlib.util.find_spec("numba") is not None:
        kernels = compile_kernels()
        found += [_of_codec(f"{codec.name}, compiled", codec, kernels) for codec in split.get(item_bytes, [])]
    found += [_of_codec("zstd-1", ZstdCodec(1)), _of_codec("zstd-3", ZstdCodec(3))]
    found.append(
        Candidate("Huffman over all bytes", lambda chunk: [memoryview(huffman.compress(chunk.data))], _decode_frame)
    )
    found.append(Candidate("chosen", lambda chunk: _tagged(*chooser.encode("bench", [chunk.data])), _untag))
    return found + _blosc2_candidates(item_bytes)


def _of_codec(name: str, codec: Codec, kernels: WordKernels = NUMPY) -> Candidate:
    def encode(chunk: Bytes) -> Sequence[memoryview]:
        use_kernels(kernels)
        pieces = codec.encode([chunk.data])
        use_kernels(NUMPY)
        assert pieces is not None
        return pieces

    def decode(stored: bytes, out: Bytes) -> None:
        use_kernels(kernels)
        codec.decode(memoryview(stored), [out.data])
        use_kernels(NUMPY)

    return Candidate(name, encode, decode)


def _decode_frame(stored: bytes, out: Bytes) -> None:
    ZstdCodec().decode(memoryview(stored), [out.data])


def _tagged(name: str, pieces: Sequence[memoryview]) -> list[memoryview]:
    """As in a pack, the codec's name stands beside the stored bytes; here in front of them."""
    return [memoryview(name.encode().ljust(16)), *pieces]


def _untag(stored: bytes, out: Bytes) -> None:
    codec_by_name(stored[:16].decode().rstrip()).decode(memoryview(stored)[16:], [out.data])


def _blosc2_candidates(item_bytes: int) -> list[Candidate]:
    if importlib.util.find_spec("blosc2") is None:
        return []
    blosc2 = importlib.import_module("blosc2")
    blosc2.set_nthreads(1)

    def candidate(name: str, codec: object, level: int) -> Candidate:
        def encode(chunk: Bytes) -> Sequence[memoryview]:
            return [
                memoryview(
                    blosc2.compress2(
                        chunk,
                        typesize=item_bytes,
                        codec=codec,
                        clevel=level,
                        filters=[blosc2.Filter.SHUFFLE],
                        filters_meta=[0],
                        nthreads=1,
                    )
                )
            ]

        return Candidate(name, encode, lambda stored, out: blosc2.decompress2(stored, dst=out, nthreads=1))

    version = blosc2.__version__
    return [
        candidate(f"blosc2 {version} shuffle, zstd level 1", blosc2.Codec.ZSTD, 1),
        candidate(f"blosc2 {version} shuffle, lz4 level 5", blosc2.Codec.LZ4, 5),
    ]


def _measure(
    data: dict[str, tuple[int, list[Bytes]]], candidates: dict[str, list[Candidate]], num_rounds: int
) -> dict[str, dict[str, Row]]:
    rows = {name: {candidate.name: Row() for candidate in candidates[name]} for name in data}
    for number in range(num_rounds + 1):  # the first warms caches and is not counted
        for name, (_, chunks) in data.items():
            outs = [np.empty_like(chunk) for chunk in chunks]
            for candidate in candidates[name]:
                row = rows[name][candidate.name]
                encode_s, decode_s, row.stored = _round(candidate, chunks, outs)
                if number:
                    num_bytes = sum(chunk.nbytes for chunk in chunks)
                    row.encode_gb_s.append(num_bytes / encode_s / 1e9)
                    row.decode_gb_s.append(num_bytes / decode_s / 1e9)
    return rows


def _round(candidate: Candidate, chunks: Sequence[Bytes], outs: Sequence[Bytes]) -> tuple[float, float, list[bytes]]:
    """Encode all chunks, then decode all of them, each into memory of its own, as into arena rows."""
    encode_s = decode_s = 0.0
    all_stored = []
    for chunk in chunks:
        began_s = time.thread_time()
        pieces = candidate.encode(chunk)
        encode_s += time.thread_time() - began_s
        all_stored.append(b"".join(pieces))
    for stored, out in zip(all_stored, outs, strict=True):
        out[:] = 0
        began_s = time.thread_time()
        candidate.decode(stored, out)
        decode_s += time.thread_time() - began_s
    for chunk, out in zip(chunks, outs, strict=True):
        assert np.array_equal(out, chunk), f"{candidate.name} is not lossless"
    return encode_s, decode_s, all_stored


def _entropy_bytes(plane: Bytes) -> float:
    frequencies = np.bincount(plane, minlength=256) / plane.size
    frequencies = frequencies[frequencies > 0]
    return float(-(frequencies * np.log2(frequencies)).sum() * plane.size / 8)


def _bound_bytes(chunk: Bytes, item_bytes: int) -> float:
    return sum(_entropy_bytes(chunk[position::item_bytes]) for position in range(item_bytes))


def _exponent_bound_bytes(chunk: Bytes) -> float:
    """The bound when values are rotated left by one bit first, so that bfloat16's exponent fills the high byte."""
    values = chunk.view(np.uint16)
    return _bound_bytes(((values << 1) | (values >> 15)).view(np.uint8), 2)


def _print_table(name: str, item_bytes: int, chunks: Sequence[Bytes], rows: dict[str, Row]) -> None:
    raw_bytes = sum(chunk.nbytes for chunk in chunks)
    bound_bytes = sum(_bound_bytes(chunk, item_bytes) for chunk in chunks)
    bound = raw_bytes / bound_bytes
    print(f"\n{name}: {len(chunks)} chunks of {chunks[0].nbytes / 2**20:.2f} MiB; order-0 bound {bound:.3f}x", end="")
    if name == "bfloat16":
        exponents = raw_bytes / sum(map(_exponent_bound_bytes, chunks))
        print(f", with the exponent in one byte {exponents:.3f}x", end="")
    print("\n| codec | ratio | above the bound's bytes | encode GB/s | decode GB/s |\n|---|---|---|---|---|")
    for label, row in rows.items():
        stored_bytes = sum(map(len, row.stored))
        print(
            f"| {label} | {raw_bytes / stored_bytes:.3f}x | {stored_bytes / bound_bytes - 1:+.1%} "
            f"| {spread(row.encode_gb_s)} | {spread(row.decode_gb_s)} |"
        )
    chosen = [stored[:16].decode().rstrip() for stored in rows["chosen"].stored]
    print(f"chosen: {statistics.mode(chosen)} for {chosen.count(statistics.mode(chosen))} of {len(chosen)}")


def _print_skipped() -> None:
    if importlib.util.find_spec("blosc2") is None:
        print("\nskipped: blosc2 (not installed; pip install blosc2)")
    if importlib.util.find_spec("numba") is None:
        print("\nskipped: compiled (numba is not installed; pip install 'kvtier[fast]')")
    print(
        "\nnot measured: LMCache's serdes, read in 0.5.6: `naive` and `kivi` return their input (1.000x), "
        "`cachegen`, `fp8`, `asym_k16_v8` and `turboquant` are lossy, `aesgcm` encrypts. None is a lossless codec."
    )


if __name__ == "__main__":
    main()
