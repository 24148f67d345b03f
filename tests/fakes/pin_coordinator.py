"""LMCache's coordinator as far as its list of pins goes: `GET /cache/pins`, in pages."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class PinCoordinator:
    """A list that a test changes.

    Attributes:
        url: Where it listens.
        hashes: Chunk hashes that are pinned, of one model and worker.
        fails: Whether it answers 500.
        num_pages: How often it was asked.
    """

    def __init__(self, url: str) -> None:
        self.url, self.hashes, self.fails = url, list[bytes](), False
        self.num_pages = 0

    def page(self, offset: int, limit: int) -> dict[str, Any]:
        """As LMCache answers, at most three a page."""
        self.num_pages += 1
        keys = [
            {
                "chunk_hash_hex": each.hex(),
                "model_name": "model",
                "kv_rank": 1 << 24,
                "object_group_id": 0,
                "cache_salt": "",
            }
            for each in self.hashes
        ]
        chosen = keys[offset : offset + min(limit, 3)]
        return {"total": len(keys), "pins": [{"key": key, "pin_count": 1} for key in chosen]}


@contextlib.contextmanager
def pin_coordinator() -> Iterator[PinCoordinator]:
    """Listen on a free port of the loopback interface until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            body = json.dumps(coordinator.page(int(query["offset"][0]), int(query["limit"][0]))).encode()
            self.send_response(500 if coordinator.fails else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    coordinator = PinCoordinator(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield coordinator
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
