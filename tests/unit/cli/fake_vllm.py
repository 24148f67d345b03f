"""A vLLM API server with a toy tokenizer, on loopback.

One token per character, except that BPE-like merges join a character pair to one token, also across the border between
what a template writes and what a user says: that is what rendering has to survive.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MERGES = ("\nA", "\n7", " A", "\n\n")
_FIRST_MERGE = 2_000_000
Template = Callable[..., str]  # messages, tools, and the kwargs of the request


class HangUpError(Exception):
    """The connection is closed instead of an answer."""


class RefusedError(Exception):
    """The template raised, as Jinja's raise_exception does."""


def encode(text: str) -> list[int]:
    """Tokenize."""
    tokens, position = [], 0
    while position < len(text):
        pair = text[position : position + 2]
        merged = pair in MERGES
        tokens.append(_FIRST_MERGE + MERGES.index(pair) if merged else ord(pair[0]))
        position += 2 if merged else 1
    return tokens


def decode(tokens: list[int]) -> str:
    """Return the text."""
    return "".join(MERGES[t - _FIRST_MERGE] if t >= _FIRST_MERGE else chr(t) for t in tokens)


def plain_template(messages: list[dict[str, Any]], tools: list[Any]) -> str:
    """Write every turn as `[role]` and its content, then the generation prompt."""
    head = f"[tools]{json.dumps(tools)}\n" if tools else ""
    return head + "".join(f"[{m['role']}]\n{m['content']}\n" for m in messages) + "[assistant]\n"


def strict_template(messages: list[dict[str, Any]], tools: list[Any]) -> str:
    """Demand that user and assistant alternate, as Mistral's and Gemma's templates do."""
    roles = [m["role"] for m in messages if m["role"] != "system"]
    if any(role != ("user", "assistant")[index % 2] for index, role in enumerate(roles)):
        raise RefusedError("Conversation roles must alternate user/assistant/user/assistant/...")
    return plain_template(messages, tools)


def folding_template(messages: list[dict[str, Any]], tools: list[Any]) -> str:
    """Put the system prompt into the first user turn; without one there is none."""
    system = "".join(m["content"] + "\n\n" for m in messages if m["role"] == "system")
    turns = [dict(m) for m in messages if m["role"] != "system"]
    if not turns:
        raise RefusedError("at least one user turn is needed")
    turns[0]["content"] = system + turns[0]["content"]
    return plain_template(turns, tools)


def thinking_template(messages: list[dict[str, Any]], tools: list[Any], enable_thinking: bool = True) -> str:
    """Say at the very beginning whether the model shall think, as SmolLM3's template does."""
    return ("" if enable_thinking else "/no_think\n") + plain_template(messages, tools)


@dataclass
class FakeVllm:
    """Its knobs and what it was asked.

    Attributes:
        template: Renders chats.
        models: Entries of /v1/models.
        on_completion: Called with the body of each completion.
        api_key: Wanted, if any.
        metrics: What /metrics answers.
        cached_tokens: What completions say of caches; None without --enable-prompt-tokens-details.
        restored_logprob: Of each token that it generates behind KV from kvtier; behind its own KV it is 0.
        statuses: Answer these paths with this status and an error.
        requests: Paths and bodies, in order.
        url: Base URL.
    """

    template: Template = plain_template
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "toy", "root": "/models/toy", "parent": None}])
    on_completion: Callable[[dict[str, Any]], None] = lambda body: None
    api_key: str = ""
    metrics: str = ""
    version: str = "0.32.0"
    cached_tokens: int | None = None
    restored_logprob: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, body: dict[str, Any], authorization: str) -> tuple[int, dict[str, Any] | str]:
        """Return status and JSON, or text."""
        self.requests.append((path, body))
        if self.api_key and authorization != f"Bearer {self.api_key}":
            return 401, {"error": "Unauthorized"}
        if path in self.statuses:
            return self.statuses[path], {"error": {"message": "asked to fail", "code": self.statuses[path]}}
        try:
            return 200, self._routes()[path](body)
        except KeyError:
            return 404, {"detail": "Not Found"}
        except RefusedError as exc:
            return 400, {"error": {"message": str(exc), "type": "BadRequestError", "code": 400}}

    def _routes(self) -> dict[str, Callable[[dict[str, Any]], dict[str, Any] | str]]:
        return {
            "/version": lambda body: {"version": self.version},
            "/health": lambda body: "",
            "/metrics": lambda body: self.metrics,
            "/v1/models": lambda body: {"object": "list", "data": self.models},
            "/tokenize": self._tokenize,
            "/detokenize": lambda body: {"prompt": decode(body["tokens"])},
            "/v1/completions": self._complete,
        }

    def _tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        if "messages" in body:
            assert body["add_generation_prompt"] is True
            kwargs = body.get("chat_template_kwargs", {})
            tokens = encode(self.template(body["messages"], body.get("tools", []), **kwargs))
        else:
            tokens = encode(body["prompt"])
        return {"count": len(tokens), "max_model_len": 10_000, "tokens": tokens}

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.on_completion(body)
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": None}
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        choice: dict[str, Any] = {"text": "."}
        if "logprobs" in body:
            logprob = self.restored_logprob if body["cache_salt"].startswith("kvtier-verify-") else 0.0
            tokens = ["token_id:1"] * body["max_tokens"]
            choice["logprobs"] = {"tokens": tokens, "top_logprobs": [{token: logprob} for token in tokens]}
        return {"choices": [choice], "usage": usage}


@contextmanager
def serving(fake: FakeVllm) -> Iterator[FakeVllm]:
    """Serve it on a free loopback port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: dict[str, Any]) -> None:
            try:
                status, value = fake.answer(self.path, body, self.headers.get("Authorization", ""))
            except HangUpError:
                self.close_connection = True
                return
            payload = (value if isinstance(value, str) else json.dumps(value)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            with suppress(BrokenPipeError):  # who asked has left
                self.end_headers()
                self.wfile.write(payload)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
