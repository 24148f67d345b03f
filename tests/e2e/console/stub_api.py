"""The console's files, and an API that answers as the daemon does, from values that tests choose and change."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from kvtier.library.values.outcome_values import RecentRequest
from kvtier.library.values.plain_json import to_jsonable
from kvtier.library.values.public_values import Advice, Evicted, Prompt, PromptState, Verdict
from kvtier.library.values.savings import savings_of
from kvtier.library.values.selectors import parse_selector
from tests.e2e.console import stub_values as made

STATIC = Path(__file__).parents[3] / "kvtier" / "web" / "static"
TOKEN = "kvt_" + "a" * 43
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class Refused(Exception):
    """An answer of problem+json."""

    def __init__(self, status: HTTPStatus, title: str, detail: str, **more: Any) -> None:
        super().__init__(detail)
        self.status, self.title, self.detail, self.more = status, title, detail, more


@dataclass
class StubDaemon:
    """What a test may set before, change meanwhile, and look at after.

    Attributes:
        token: Empty: none is asked for.
        role: Of the caller.
        calls: What changed something: method, path below /api/v1/ and body.
        broken: Paths that answer 503.
        holds: Says of a method, path and body whether its answer has to wait; it is asked until it does not.
        is_silent: Streams of events send nothing, and stay open.
        num_streams: Streams that were opened.
        num_verified: Chunks that a verification compares in each tier.
        num_damaged: Those in host memory that were not what was stored.
        applied: The text that was applied last.
    """

    prompts: dict[str, Prompt] = field(default_factory=dict)
    requests: list[RecentRequest] = field(default_factory=list)
    advice: Advice | None = None
    token: str = ""
    role: str = "admin"
    engines: bool = True
    breaker: str = ""
    with_history: bool = True
    has_store: bool = True
    calls: list[tuple[str, str, Any]] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    streams: list[Queue[dict[str, Any] | None]] = field(default_factory=list)
    url: str = ""
    holds: Callable[[str, str, Any], bool] = lambda *_: False
    is_silent: bool = False
    num_streams: int = 0
    num_verified: int = 47
    num_damaged: int = 0
    applied: str = ""

    def emit(self, event: str, level: str = "info", /, **fields: str) -> None:
        """Send an event to everyone who follows."""
        for stream in list(self.streams):
            stream.put({"name": event, "unix_s": made.now(), "level": level, "fields": fields})

    def cut_streams(self) -> None:
        """End the streams of events."""
        for stream in list(self.streams):
            stream.put(None)

    def finish_replacement(self, name: str) -> None:
        """Give what waits to replace a prompt its name."""
        staged = self.prompts.pop(self.prompts[name].replacement)
        self.prompts[f"{name}@2"] = replace(self.prompts[name], name=f"{name}@2", pinned=False, replacement="")
        self.prompts[name] = replace(staged, name=name, origin="named", state=PromptState.DURABLE)

    def known(self, name: str) -> Prompt:
        """Return a prompt, or refuse as the daemon does."""
        if name not in self.prompts:
            detail = f"there is no prompt '{name}'; kvtier list shows what there is"
            raise Refused(HTTPStatus.NOT_FOUND, "PromptNotFoundError", detail)
        return self.prompts[name]


def full_daemon(count: int = len(made.NAMES)) -> StubDaemon:
    """Return one that has much to show."""
    now_s = made.now()
    known = made.prompts(now_s, count)
    return StubDaemon(
        prompts={each.name: each for each in known}, requests=made.requests(now_s, known), advice=made.advice(now_s)
    )


def answer(daemon: StubDaemon, method: str, path: str, query: Mapping[str, str], body: Any) -> Any:
    """Return the JSON value of a call."""
    daemon.asked.append(path)
    while daemon.url and daemon.holds(method, path, body):
        time.sleep(0.02)
    if path in daemon.broken:
        raise Refused(
            HTTPStatus.SERVICE_UNAVAILABLE, "DaemonUnreachableError", "no daemon answers; start kvtier-daemon"
        )
    if method != "GET":
        daemon.calls.append((method, path, body))
    if path.startswith("prompts/"):
        name, _, part = path.removeprefix("prompts/").partition("/")
        return _of_prompt(daemon, method, unquote(name), part, query, body)
    if path.startswith("requests/"):
        return _explain_recent(daemon, unquote(path.removeprefix("requests/")))
    return _READS[path](daemon, query, body)


def _of_prompt(daemon: StubDaemon, method: str, name: str, part: str, query: Mapping[str, str], body: Any) -> Any:
    if method == "PUT":
        return _pin(daemon, name, body)
    if part == "adopt":
        return _adopt(daemon, name, body)
    prompt = daemon.known(name)
    if method == "PATCH":
        changed = replace(prompt, **{key: value for key, value in body.items() if key != "labels"})
        daemon.prompts[name] = changed
        return to_jsonable(changed)
    if part in _PARTS:
        return _PARTS[part](daemon, prompt, body)
    assert (method, part) == ("GET", "")
    return to_jsonable(prompt, with_recipe=True)


def _pin(daemon: StubDaemon, name: str, body: Mapping[str, Any]) -> Any:
    old, has_source = daemon.prompts.get(name), bool({"system", "messages", "text", "tokens"} & body.keys())
    recipe = made.recipe(body.get("system", "")) if has_source or old is None else old.recipe
    is_same = old is not None and recipe == old.recipe
    if old is not None and old.pinned and not is_same and not body.get("replace"):
        detail = f"there is a prompt '{name}' with other content; give replace"
        raise Refused(HTTPStatus.CONFLICT, "PromptExistsError", detail)
    model = next(iter(made.prompts(made.now(), 1)))
    pinned = replace(
        model, name=name, pin_id=f"pin-{name}", state=PromptState.CAPTURING, recipe=recipe,
        priority=body.get("priority", 0),
    )  # fmt: skip
    if old is not None and old.pinned and not is_same:
        pinned = replace(pinned, name=f"{name}@3", pin_id=f"pin-{name}@3", origin="replacement")
        daemon.prompts[name] = replace(old, replacement=pinned.name)
    daemon.prompts[pinned.name] = pinned
    daemon.emit("pin_registered", name=name, num_tokens=str(pinned.num_tokens), model=made.MODEL)
    return to_jsonable(pinned)


def _versions(daemon: StubDaemon, prompt: Prompt, _: Any) -> Any:
    old = [each for each in daemon.prompts.values() if each.name.startswith(f"{prompt.name}@")]
    return {"versions": [to_jsonable(each) for each in [*old, prompt]]}


def _chunks(_: StubDaemon, prompt: Prompt, __: Any) -> Any:
    places = made.chunk_bytes(prompt).hex()
    binding = prompt.bindings[0]
    return {
        "name": prompt.name, "namespace_id": binding.namespace_id, "chunks": places,
        "covered_tokens": binding.covered_tokens,
    }  # fmt: skip


def _evict(daemon: StubDaemon, prompt: Prompt, body: Mapping[str, Any]) -> Any:
    if prompt.pinned and not body.get("force"):
        raise Refused(HTTPStatus.CONFLICT, "PromptPinnedError", f"'{prompt.name}' is pinned; give force, or unpin it")
    if not prompt.pinned and not body.get("tier"):
        del daemon.prompts[prompt.name]
    daemon.emit("prompt_evicted", name=prompt.name, tier=body.get("tier", "any"), chunks="47")
    return to_jsonable(Evicted(num_chunks=47, host_bytes=47 << 20, disk_bytes=31 << 20, num_shared_chunks=4))


def _unpin(daemon: StubDaemon, prompt: Prompt, _: Any) -> Any:
    daemon.prompts[prompt.name] = replace(prompt, pinned=False)
    daemon.emit("pin_ended", name=prompt.name)
    return to_jsonable(daemon.prompts[prompt.name])


def _rename(daemon: StubDaemon, prompt: Prompt, body: Mapping[str, Any]) -> Any:
    renamed = replace(prompt, name=body["new_name"])
    del daemon.prompts[prompt.name]
    daemon.prompts[renamed.name] = renamed
    return to_jsonable(renamed)


def _adopt(daemon: StubDaemon, name: str, body: Mapping[str, Any]) -> Any:
    prompt = daemon.known(body["automatic"])
    adopted = replace(prompt, name=name, origin="named")
    del daemon.prompts[prompt.name]
    daemon.prompts[adopted.name] = adopted
    if daemon.advice is not None:
        namespaces = tuple(
            replace(each, prefixes=tuple(
                replace(prefix, pin_name=adopted.name, verdict=Verdict.NAMED) if prefix.pin_name == prompt.name
                else prefix for prefix in each.prefixes))
            for each in daemon.advice.namespaces
        )  # fmt: skip
        daemon.advice = replace(daemon.advice, namespaces=namespaces)
    return to_jsonable(adopted)


def _verify(daemon: StubDaemon, prompt: Prompt, _: Any) -> Any:
    whole = daemon.num_verified
    tier = {
        "num_verified_chunks": whole, "num_damaged_chunks": 0, "num_missing_chunks": 47 - whole,
        "num_refused_chunks": 0, "verified_bytes": whole << 20,
    }  # fmt: skip
    namespace = {
        "namespace_id": made.NAMESPACE, "model": made.MODEL, "num_chunks": 47,
        "host": tier | {"num_damaged_chunks": daemon.num_damaged}, "disk": tier, "num_lost_chunks": 47 - whole,
        "num_differing_chunks": 0,
    }  # fmt: skip
    return {"name": prompt.name, "checksums": {"name": prompt.name, "namespaces": [namespace], "seconds": 0.1}}


_PARTS: Mapping[str, Callable[[StubDaemon, Prompt, Any], Any]] = {
    "versions": _versions, "chunks": _chunks, "evict": _evict, "unpin": _unpin, "rename": _rename,
    "rollback": lambda _, prompt, __: to_jsonable(prompt), "verify": _verify,
}  # fmt: skip


def _list(daemon: StubDaemon, query: Mapping[str, str], _: Any) -> Any:
    try:
        wanted = parse_selector("selector", *filter(None, [query.get("selector")]))
    except Exception as exc:
        raise Refused(HTTPStatus.BAD_REQUEST, "InvalidArgumentError", str(exc)) from exc
    size, after = int(query.get("page_size", 100)), query.get("page_token", "")
    state = query.get("state", "")
    found = [
        each for name, each in sorted(daemon.prompts.items())
        if name > after and wanted.matches(each.labels) and state.lower() in ("", each.state.value)
    ]  # fmt: skip
    more = found[size - 1].name if len(found) > size else ""
    return {"prompts": [to_jsonable(each) for each in found[:size]], "next_page_token": more}


def _savings(daemon: StubDaemon, _: Mapping[str, str], __: Any) -> Any:
    known = list(daemon.prompts.values())
    return to_jsonable(savings_of(made.status(made.now(), known), known))


def _history(daemon: StubDaemon, query: Mapping[str, str], _: Any) -> Any:
    week = query["span"] == "week"
    rows = list(made.traffic(made.now(), 604_800 if week else 3600)) if daemon.with_history else []
    rows = rows[:: max(1, len(rows) // int(query.get("points", 360)))]
    names = ("device", "host", "disk", "computed")
    return {
        "span": query["span"], "unix_s": [at_s for at_s, _ in rows],
        "series": {f"prompt_tokens_{name}": [values[name] for _, values in rows] for name in names},
    }  # fmt: skip


def _requests(daemon: StubDaemon, query: Mapping[str, str], _: Any) -> Any:
    good = ("hit", "unknown", "too_short")
    wanted = [each for each in daemon.requests if "misses_only" not in query or each.outcome.value not in good]
    return {"requests": [to_jsonable(each) for each in wanted[: int(query.get("limit", 100))]]}


def _explain(daemon: StubDaemon, _: Mapping[str, str], __: Any) -> Any:
    nearest, other = list(daemon.prompts.values())[:2]
    explanation, difference = made.explanation(nearest, None)
    near = replace(explanation.prompts[0], name=other.name, pin_id=other.pin_id, shared_tokens=17, differs_at=17)
    explanation = replace(explanation, prompts=(*explanation.prompts, near))
    return {"explanation": to_jsonable(explanation), "num_tokens": 426, "difference": difference}


def _explain_recent(daemon: StubDaemon, request_id: str) -> Any:
    request = next((each for each in daemon.requests if each.request_id == request_id), None)
    if request is None:
        raise Refused(HTTPStatus.NOT_FOUND, "RequestNotFoundError", "it is not among the last requests")
    explanation, _ = made.explanation(next(iter(daemon.prompts.values())), request)
    return {"explanation": to_jsonable(explanation), "num_tokens": 0, "difference": None}


def _apply(daemon: StubDaemon, query: Mapping[str, str], text: str) -> Any:
    if "sytem:" in text:
        message = "text:4:5: prompts[0].sytem: is no field of a prompt; did you mean system?"
        error = {"file": "text", "line": 4, "column": 5, "field": "prompts[0].sytem", "message": message}
        raise Refused(HTTPStatus.BAD_REQUEST, "DeclaredErrors", message, errors=[error])
    changes = [
        {"name": "support-bot", "change": "replace", "fields": {"priority": {"before": 0, "after": 10}}},
        {"name": "translator", "change": "create", "fields": {}},
    ]
    is_late = "slow" in text and not query.keys() & {"dry_run", "warm"}
    changes = [] if text == daemon.applied else changes
    if "dry_run" not in query:
        daemon.applied = text
    return {
        "changes": changes, "num_unchanged": 3, "unrendered": [], "incomplete": ["translator"] * is_late, "errors": [],
        "not_in_files": ["old-bot"], "refused": [],
    }  # fmt: skip


def _whoami(daemon: StubDaemon, _: Mapping[str, str], __: Any) -> Any:
    return {
        "name": "ada" if daemon.token else "local",
        "role": daemon.role,
        "owner": "",
        "address": "127.0.0.1",
        "version": "0.1.0",
    }


_READS: Mapping[str, Callable[[StubDaemon, Mapping[str, str], Any], Any]] = {
    "whoami": _whoami,
    "status": lambda daemon, _, __: to_jsonable(
        made.status(made.now(), list(daemon.prompts.values()), engines=daemon.engines, breaker=daemon.breaker)
    ),
    "prompts": _list,
    "savings": _savings,
    "history": _history,
    "readiness": lambda daemon, _, __: to_jsonable(made.readiness(list(daemon.prompts.values()))),
    "remote": lambda daemon, _, __: to_jsonable(
        made.remote(made.now()) if daemon.has_store else replace(made.remote(0), url="")
    ),
    "advice": lambda daemon, _, __: to_jsonable(daemon.advice or Advice(mode="pin", max_bytes=0, namespaces=())),
    "requests": _requests,
    "explain": _explain,
    "apply": _apply,
}


def _handler(daemon: StubDaemon) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._serve()

        do_POST = do_PUT = do_PATCH = do_GET

        def _serve(self) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length)
            if not parts.path.startswith("/api/v1/"):
                self._file(parts.path)
                return
            try:
                if daemon.token and self.headers.get("Authorization") != f"Bearer {daemon.token}":
                    raise Refused(HTTPStatus.UNAUTHORIZED, "UnauthenticatedError", "give a token")  # noqa: TRY301
                path = parts.path.removeprefix("/api/v1/")
                if path == "events" and path not in daemon.broken:
                    self._events()
                    return
                sent = body.decode() if path == "apply" else json.loads(body or b"null")
                value = answer(daemon, self.command, path, dict(parse_qsl(parts.query)), sent)
                self._send(HTTPStatus.OK, "application/json", json.dumps(value).encode())
            except Refused as refused:
                problem = {"title": refused.title, "status": int(refused.status), "detail": refused.detail}
                problem |= refused.more
                self._send(refused.status, "application/problem+json", json.dumps(problem).encode())

        def _file(self, path: str) -> None:
            file = STATIC / ("index.html" if path == "/" else path.removeprefix("/static/"))
            if file.is_file() and STATIC in file.parents:
                self._send(HTTPStatus.OK, _KINDS[file.suffix], file.read_bytes())
            else:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", b"")

        def _events(self) -> None:
            stream: Queue[dict[str, Any] | None] = Queue()
            daemon.streams.append(stream)
            daemon.num_streams += 1
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            try:
                while daemon.url:
                    try:
                        if (event := stream.get(timeout=0.2)) is None:
                            break
                        text = f"data: {json.dumps(event)}\n\n"
                    except Empty:
                        if daemon.is_silent:
                            continue
                        text = ": alive\n\n"
                    self.wfile.write(text.encode())
                    self.wfile.flush()
            except OSError:
                pass
            finally:
                daemon.streams.remove(stream)
                self.close_connection = True

        def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", CSP)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves is no fault."""


@contextmanager
def served(daemon: StubDaemon) -> Iterator[StubDaemon]:
    """Serve it on a port of loopback, which `url` names."""
    with _Server(("127.0.0.1", 0), _handler(daemon)) as server:
        daemon.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, name="console-stub")
        thread.start()
        try:
            yield daemon
        finally:
            daemon.url = ""
            server.shutdown()
            thread.join()
