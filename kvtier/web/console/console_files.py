"""The console: HTML, CSS and ES modules of the wheel, at `/` and `/static/`.

They are read once, at the start: a path of a request is looked up and never opened. Browsers keep them, and ask each
time whether they are still the same, so that no page is mixed of two versions.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

STATIC = Path(__file__).parents[1] / "static"

_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class _File:
    body: bytes
    media_type: str
    etag: str


class ConsoleFiles:
    """All files, in memory: 150 KB."""

    def __init__(self, folder: Path = STATIC) -> None:
        """Read a folder and those in it; files of other types are left out."""
        found = (path for path in folder.rglob("*") if path.suffix in _TYPES)
        self._files: Mapping[str, _File] = {path.relative_to(folder).as_posix(): _read(path) for path in found}

    def routes(self) -> Iterable[BaseRoute]:
        """Return what answers at `/` and below `/static/`."""
        yield Route("/", self._index, name="console", include_in_schema=False)
        yield Route("/static/{path:path}", self._static, name="console_file", include_in_schema=False)

    async def _index(self, request: Request) -> Response:
        return self._answer(request, _INDEX)

    async def _static(self, request: Request) -> Response:
        return self._answer(request, request.path_params["path"])

    def _answer(self, request: Request, path: str) -> Response:
        file = self._files.get(path)
        if file is None:
            return Response("no such file of the console", HTTPStatus.NOT_FOUND, media_type="text/plain")
        headers = {"ETag": file.etag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(file.body, headers=headers, media_type=file.media_type)


def _read(path: Path) -> _File:
    body = path.read_bytes()
    digest = hashlib.blake2b(body, digest_size=12).hexdigest()
    return _File(body=body, media_type=_TYPES[path.suffix], etag=f'"{digest}"')
