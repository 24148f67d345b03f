"""Finds vLLM's own API server, for `warm_url = "auto"`: vLLM tells the engine's process neither host nor port.

`vllm serve` listens in the process that starts the engine's or, with several API servers, in other children of that
one. Source: `setup_server` of `entrypoints/launchers/launcher.py` and `run_multi_api_server` of
`entrypoints/cli/serve.py`, vLLM 0.32.
"""

import http.client
import json
import multiprocessing
from collections.abc import Iterator
from contextlib import closing, suppress

import psutil

_TIMEOUT_S = 5.0
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where one connects to a server that listens at every address."""


def find_api_server(vllm_version: str) -> str | None:
    """Return the URL of the API server of this engine; None: there is none that answers, or none yet.

    It is asked for its version first, so that another program's server is sent no prompt. Over TLS it is not found.
    """
    if (starter := multiprocessing.parent_process()) is None or starter.pid is None:
        return None  # an engine in its user's own process
    for host, port in dict.fromkeys(_listening(starter.pid)):
        if _version(host, port) == vllm_version:
            return f"http://{f'[{host}]' if ':' in host else host}:{port}"
    return None


def _listening(pid: int) -> Iterator[tuple[str, int]]:
    """Yield where a process and its children accept TCP connections."""
    with suppress(psutil.Error):
        starter = psutil.Process(pid)
        for process in (starter, *starter.children()):
            with suppress(psutil.Error):  # it has just ended
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        yield _ANY_ADDRESS.get(connection.laddr.ip, connection.laddr.ip), connection.laddr.port


def _version(host: str, port: int) -> object:
    """Return what a server answers as its version; None if it is none of vLLM."""
    with closing(http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)) as connection:
        try:
            connection.request("GET", "/version")
            answer = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            return None
    return answer.get("version") if isinstance(answer, dict) else None
