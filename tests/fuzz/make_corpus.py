"""`python -m tests.fuzz.make_corpus`: writes the inputs of `corpus` that are made by hand, each with its reason."""

import struct

from kvtier.core.arena_format import ArenaGeometry, pack_header
from kvtier.disk.codecs.zstd import ZstdCodec
from tests.fakes.bundles import bundle_bytes
from tests.fuzz.base import CORPUS
from tests.fuzz.rpc_target import packed
from tests.fuzz.wire.request_making import OPERATOR, request_of


def inputs() -> dict[str, bytes]:
    """Return each input by its path."""
    nested = b"[" * 30_000
    bomb = b"".join(ZstdCodec(19).encode([memoryview(bytes(1 << 29))]))
    infinite = b'{"__metadata__":{"kvtier.format":"1","kvtier.chunks":"{}"},"00":{"data_offsets":[0,1e999]}}'
    huge = pack_header(
        ArenaGeometry(arena_id=b"a" * 16, num_slots=2**60, row_bytes=4096, num_ranks=2**40, rank_bytes=2**63)
    )
    no_ranks = pack_header(ArenaGeometry(arena_id=b"b" * 16, num_slots=3, row_bytes=4096, num_ranks=0, rank_bytes=0))
    return {
        # RecursionError and OverflowError came through to fsck and to the adoption of packs.
        "packs/nested-header": len(nested).to_bytes(8, "little") + nested,
        "packs/infinite-offset": len(infinite).to_bytes(8, "little") + infinite,
        "packs/header-of-8-EiB": b"\xff" * 16,
        # Ended the process.
        "yaml/nested-lists": b"[" * 40_000,
        "yaml/nested-items": b"- " * 10_000,
        # Decode to what a reader has no memory for: a chunk's length is known before.
        "codecs/zstd-bomb": bytes([1]) + (4096).to_bytes(3, "little") + bomb,
        "codecs/zstd-window": bytes([1]) + (4096).to_bytes(3, "little") + b"\x28\xb5\x2f\xfd\x00\xff" + b"\0" * 40,
        "codecs/zstd-skippable": bytes([1])
        + (64).to_bytes(3, "little")
        + b"\x50\x2a\x4d\x18"
        + struct.pack("<I", 2**31),
        "bundles/header-of-4-GiB": (2**32).to_bytes(8, "little") + b'{"__metadata__":{',
        "bundles/nested-header": len(nested).to_bytes(8, "little") + nested,
        "bundles/tensor-of-2-to-the-50": (200).to_bytes(8, "little")
        + b'{"__metadata__":{"kvtier.bundle":"3"},"kvtier.xxh3_64":{"dtype":"U64","shape":[999999999999999],'.ljust(
            200
        ),
        "arenas/huge": huge.ljust(4096, b"\0"),
        "arenas/no-ranks": no_ranks.ljust(4096 + 4096 + 3 * 4096, b"\0"),
        "ledgers/only-magic": b"SQLite format 3\0" + bytes(4080),
        "ledgers/empty": b"",
        # pydantic's own error came through.
        "toml/another-case": b'[loG]\nlevel = "loud"\n',
        "toml/nested": b"a = " + nested,
        "toml/long-number": b"[host]\nbytes = " + b"9" * 5000,
        "toml/owners": b'[owners]\n"' + b"x" * 3000 + b'" = { pins = -1, tokens = inf, bytes = "1e400B" }\n',
        # Ends a session while its engine still sends.
        "rpc/attach-undecodable": packed("Attach", [b"\xff" * 500] * 10),
        "rpc/list-page-token": packed("ListPrompts", [b"\x08\x01\x12\x88\x27" + b"\xc3\xb6" * 2500]),
        "rpc/no-message-at-all": packed("Import", []),
        **_http(),
    }


def _http() -> dict[str, bytes]:
    operator = b"Bearer " + OPERATOR

    def call(method: str, path: str, body: bytes, *headers: bytes) -> bytes:
        return request_of(method, f"/api/v1/{path}", body, *headers, authorization=operator)

    chunks = call("POST", "explain", b"", b"Transfer-Encoding: chunked")
    return {
        # ValueError before anyone was asked who it is: 500 without the headers that browsers need.
        "http/origin-no-url": request_of("POST", "/api/v1/explain", b"{}", b"Origin: http://["),
        # A proxy in front may go by the other length.
        "http/two-lengths": call("POST", "explain", b"0\r\n\r\n", b"Transfer-Encoding: chunked"),
        # A traceback in the log each time.
        "http/body-that-is-left": call("POST", "explain", b"{}")[:-1],
        "http/no-chunk": chunks + b"no chunk\r\n",
        "http/no-chunk-of-head": chunks.replace(b"POST /api/v1/explain", b"HEAD /readyz") + b"no chunk\r\n",
        "http/no-chunk-behind-an-answer": chunks.replace(b"/api/v1/explain", b"/healthz") + b"no chunk\r\n",
        "http/bundle-that-is-left": call("POST", "bundles", bundle_bytes())[:-1],
        # Five seconds of CPU in h11 (of 60 KB half a minute), while no other thread runs.
        "http/blanks-before-a-nul": request_of("GET", "/healthz", b"", b"X: " + b" " * 30_000 + b"\0"),
        # 500, with a traceback.
        "http/ttl-of-less-than-0": call("PATCH", "prompts/own%2Fprompt", b'{"ttl_s": -9223372036854775808}'),
        "http/ttl-of-65-bits": call("POST", f"bundles?ttl_s={2**64}", b""),
        "http/version-of-less-than-0": call("POST", "prompts/own%2Fprompt/rollback", b'{"version": -1}'),
        "http/tokens-no-list": call("PUT", "prompts/p", b'{"tokens": 5}'),
        "http/tokens-no-numbers": call("POST", "explain", b'{"tokens": ["a"]}'),
        "http/request-no-object": call("POST", "explain", b'{"request": [1]}'),
    }


def main() -> None:
    """Write them."""
    for name, data in inputs().items():
        path = CORPUS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    main()
