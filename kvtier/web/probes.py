"""`GET /metrics`, `/healthz` and `/readyz`: they need no credentials, and no call of the API delays them (ADR 15)."""

import logging
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from kvtier.errors import TooManyCallsError
from kvtier.obs.exposition import Exposition, Problem, Read
from kvtier.web.call_threads import CallThreads

METRICS_PATH = "/metrics"
HEALTH_PATH = "/healthz"
READY_PATH = "/readyz"

logger = logging.getLogger(__name__)

_NO_ANSWER = "the daemon's event loop does not answer"
_DEFECT = "a defect of kvtier: the daemon's log has its traceback"


class Probes:
    """Answers from a reading that the daemon's loop takes."""

    def __init__(self, read: Read, problem: Problem, threads: CallThreads) -> None:
        """Take what says how the daemon is; see `Read` and `Problem` of kvtier.obs.exposition."""
        self._exposition, self._problem, self._threads = Exposition(read), problem, threads

    def routes(self) -> list[BaseRoute]:
        """Return the paths."""
        return [
            Route(METRICS_PATH, self.metrics),
            Route(HEALTH_PATH, self.health),
            Route(READY_PATH, self.ready),
        ]

    async def metrics(self, request: Request) -> Response:
        """Answer all metrics, in the format of Prometheus."""
        accept, encoding = request.headers.get("accept", ""), request.headers.get("accept-encoding", "")
        try:
            scrape = await self._threads.run(lambda: self._exposition.scrape(accept, encoding))
        except TooManyCallsError as exc:
            return _text(str(exc), HTTPStatus.SERVICE_UNAVAILABLE)
        except TimeoutError:
            return _text(_NO_ANSWER, HTTPStatus.SERVICE_UNAVAILABLE)
        except Exception:
            logger.exception("the metrics cannot be read")  # a defect: the traceback is of use
            return _text(_DEFECT, HTTPStatus.INTERNAL_SERVER_ERROR)
        return Response(scrape.body, headers=dict(scrape.headers))

    async def health(self, _: Request) -> Response:
        """Say that the process serves HTTP."""
        return _text("ok", HTTPStatus.OK)

    async def ready(self, _: Request) -> Response:
        """Say whether every prompt that operators pinned is durable for the attached engines, or what is not."""
        try:
            problem = await self._threads.run(self._problem)
        except TooManyCallsError as exc:
            problem = str(exc)
        except TimeoutError:
            problem = _NO_ANSWER
        return _text(problem or "ready", HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK)


def _text(line: str, status: HTTPStatus) -> Response:
    return PlainTextResponse(f"{line}\n", status)
