"""moto's server on loopback, in which changes of one object come one after the other.

    python -m tests.fakes.moto_server PORT

moto looks at `If-Match` and `If-None-Match`, and then writes, in a thread for each request: of two swaps at once both
could win, which S3 rules out.
"""

import io
import sys
import threading
from collections import defaultdict
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple


class OneChangeAtATime(DomainDispatcherApplication):
    """Serves requests that change something one by one for each path; others as they come."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return super().__call__(environ, start_response)
        # All of the body first: a client that stops in the middle of it must not hold up the others.
        if not environ.get("wsgi.input_terminated"):
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
        with self._locks[environ["PATH_INFO"]]:
            return super().__call__(environ, start_response)


if __name__ == "__main__":
    app = OneChangeAtATime(create_backend_app)
    run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=True, request_handler=MotoRequestHandler)
