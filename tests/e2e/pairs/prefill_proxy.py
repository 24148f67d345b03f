"""A proxy for a pair of engines, as vLLM's `disagg_proxy_demo.py`: a prefill of one token, then the request itself."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

# As vLLM's `toy_proxy_server.py` for NIXL sends it.
_ASKS_FOR_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class PrefillProxy(ThreadingHTTPServer):
    """Passes completions on; with `passes_params` also the fields by which NIXL's connectors find each other.

    kvtier needs none of these.

    A prefill that fails is left out: the decode engine computes the prompt. A decode engine that fails is replaced by
    the prefill engine, which serves whole requests as well.
    """

    daemon_threads = True

    def __init__(self, prefill_url: str, decode_url: str, *, passes_params: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.prefill_url, self.decode_url = prefill_url, decode_url
        # Keeps connections, so that the second request is not late; but none that vLLM may be closing, see `Engine`.
        self._http = httpx.Client(timeout=300, limits=httpx.Limits(keepalive_expiry=1))
        self._passes_params = passes_params
        self.num_failed_prefills = self.num_failed_decodes = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def server_close(self) -> None:
        """Close the connections, too."""
        super().server_close()
        self._http.close()

    def complete(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """Return status and body of the answer."""
        one_token = {**body, "max_tokens": 1, "stream": False}
        if "max_completion_tokens" in body:
            one_token["max_completion_tokens"] = 1
        request = dict(body)
        if self._passes_params:
            one_token["kv_transfer_params"] = _ASKS_FOR_PARAMS
        try:
            prefilled = self._http.post(f"{self.prefill_url}{path}", json=one_token).raise_for_status()
            if self._passes_params:
                request["kv_transfer_params"] = prefilled.json()["kv_transfer_params"]
        except httpx.HTTPError:
            self.num_failed_prefills += 1
        try:
            answer = self._http.post(f"{self.decode_url}{path}", json=request)
        except httpx.TransportError:
            self.num_failed_decodes += 1
            answer = self._http.post(f"{self.prefill_url}{path}", json=dict(body))
        return answer.status_code, answer.content


class _Handler(BaseHTTPRequestHandler):
    server: PrefillProxy

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, content = self.server.complete(self.path, body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def running_proxy(prefill_url: str, decode_url: str, *, passes_params: bool = False) -> Iterator[PrefillProxy]:
    """Run a proxy in a thread."""
    with PrefillProxy(prefill_url, decode_url, passes_params=passes_params) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, name="proxy")
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join(10)
