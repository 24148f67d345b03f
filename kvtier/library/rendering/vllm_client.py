"""Client of vLLM's API server: models, settings, /tokenize, /detokenize and completions of one token."""

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from kvtier.client.warm_requests import warm_body
from kvtier.errors import InvalidArgumentError, RenderError
from kvtier.json_text import JsonError, read_json
from kvtier.library.rendering.field_names import PYTHON_NAMES, FieldNames
from kvtier.printable import SHOWN_CHARS, cut, shown_url

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 60.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_CACHE_CONFIG_METRIC = "vllm:cache_config_info{"
_WAITING_METRIC = "vllm:num_requests_waiting{"
_NUMBER = re.compile(r"[0-9]{1,15}")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class VllmUnreachableError(RenderError):
    """No vLLM answers at the URL."""

    def __init__(self, url: str, problem: str, names: FieldNames = PYTHON_NAMES) -> None:
        super().__init__(
            f"no vLLM answers at {url} ({problem}); start `vllm serve` and wait until it is ready, or pass "
            f"{names['url']}"
        )
        self.url = url


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One entry of GET /v1/models.

    Attributes:
        base: The base model of a LoRA adapter; for a base model its first name.
        lora_path: Path that vLLM loaded the adapter from; empty for a base model.
        max_tokens: Of prompt and answer together; 0: vLLM does not say.
    """

    name: str
    base: str
    lora_path: str = ""
    max_tokens: int = 0

    @property
    def lora_name(self) -> str:
        return self.name if self.lora_path else ""


class CacheCapacity(NamedTuple):
    """Size of vLLM's prefix cache: tokens that fit, and tokens of one block."""

    num_tokens: int
    block_tokens: int


class VllmClient(AbstractContextManager["VllmClient"]):
    """The part of vLLM's HTTP API that kvtier needs; `url` is its base URL without secrets.

    All methods raise VllmUnreachableError when no server answers, RenderError when vLLM refuses.
    """

    def __init__(
        self, url: str, api_key: str | None = None, names: FieldNames = PYTHON_NAMES, *, in_turns: bool = False
    ) -> None:
        """Take the base URL; a trailing /v1 is removed, because /tokenize is beside it.

        Args:
            url: With or without /v1.
            api_key: Sent as a bearer token.
            names: Of arguments, for error messages.
            in_turns: Let other threads run while long answers are read; see `read_json`.

        Raises:
            InvalidArgumentError: Not an HTTP URL, or a key that no header can hold.
        """
        import httpx  # here, because it takes a tenth of a second to load, and most commands ask no vLLM

        trimmed = url.rstrip("/").removesuffix("/v1")
        base_url = _checked_url(trimmed, names["url"])
        self.url, self._names, self._in_turns = shown_url(trimmed), names, in_turns
        self._no_vllm = f"{names['url']} must be the base URL of a vLLM server, like http://127.0.0.1:8000"
        self._http = httpx.Client(
            base_url=base_url,
            headers={"Authorization": f"Bearer {_checked_key(api_key, names['api_key'])}"} if api_key else {},
            # A proxy from the environment cannot reach our loopback; to load CA files for http would cost 0.1 s.
            trust_env=base_url.host not in _LOOPBACK,
            verify=base_url.scheme == "https",
        )

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def models(self) -> list[ServedModel]:
        """Return the served models: base models first, as vLLM lists them."""
        entries = self._request("GET", "/v1/models").get("data") or []
        if not isinstance(entries, list) or not all(
            isinstance(e, dict) and isinstance(e.get("id"), str) for e in entries
        ):
            raise RenderError(f"{self.url}/v1/models did not answer with models; {self._no_vllm}")
        # Aliases of one model share its root; engines use the first of them.
        first_names: dict[str, str] = {}
        served = []
        for entry in entries:
            name, root, parent = entry["id"], entry.get("root"), entry.get("parent")
            if parent:
                served.append(ServedModel(name=name, base=str(parent), lora_path=str(root or name)))
            else:
                length = entry.get("max_model_len")
                max_tokens = length if isinstance(length, int) else 0
                base = first_names.setdefault(str(root), name)
                served.append(ServedModel(name=name, base=base, max_tokens=max_tokens))
        return served

    def model_names(self) -> list[str]:
        return [model.name for model in self.models()]

    def version(self) -> str:
        return str(self._request("GET", "/version").get("version", ""))

    def cache_config(self) -> dict[str, str]:
        """Return vLLM's CacheConfig from the labels of a metric; empty when vLLM does not export it.

        Source: `metrics_info` of vLLM 0.32, which writes every value with `str`.
        """
        shown = next(iter(self._metric(_CACHE_CONFIG_METRIC)), "")
        return {match[1]: match[2] for match in _LABEL.finditer(shown)}

    def cache_capacity(self) -> CacheCapacity | None:
        """Return the size of vLLM's prefix cache; None when vLLM does not report it (--disable-log-stats)."""
        config = self.cache_config()
        block_tokens, num_blocks = (_number(config.get(name)) for name in ("block_size", "num_gpu_blocks"))
        # If several KV groups share the blocks, only vLLM knows how many tokens fit; older versions do not report it.
        num_tokens = _number(config.get("kv_cache_size_tokens")) or num_blocks * block_tokens
        return CacheCapacity(num_tokens, block_tokens) if num_tokens and block_tokens else None

    def num_waiting(self) -> int:
        """Return how many requests wait in vLLM's queues; 0 when vLLM does not report it."""
        values = [line.rpartition(" ")[2] for line in self._metric(_WAITING_METRIC)]
        return sum(_number(value.partition(".")[0]) for value in values)

    def _metric(self, name: str) -> list[str]:
        return [line for line in _text(self._send("GET", "/metrics")).splitlines() if line.startswith(name)]

    def tokenize_chat(
        self,
        model: str,
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Render messages with the chat template of the model, including the generation prompt.

        These kwargs override those of `--default-chat-template-kwargs`, as in a request.
        """
        body: dict[str, Any] = {"model": model, "messages": list(messages), "add_generation_prompt": True}
        body |= {"tools": list(tools)} if tools else {}
        body |= {"chat_template_kwargs": dict(chat_template_kwargs)} if chat_template_kwargs else {}
        return self._tokenize(body)

    def tokenize_text(self, model: str, text: str) -> list[int]:
        """Tokenize as the completions API does, including special tokens."""
        return self._tokenize({"model": model, "prompt": text})

    def detokenize(self, model: str, tokens: Sequence[int]) -> str:
        return str(self._request("POST", "/detokenize", {"model": model, "tokens": list(tokens)}).get("prompt", ""))

    def warm(
        self, model: str, tokens: Sequence[int], cache_salt: str, timeout_s: float, *, request_id: str = ""
    ) -> int | None:
        """Let vLLM compute or load the tokens: request a completion of one token.

        Returns how many it did not compute; None when it does not report that (--enable-prompt-tokens-details).
        """
        body = warm_body(model, tokens, cache_salt, request_id)
        usage = self._request("POST", "/v1/completions", body, timeout_s).get("usage")
        details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
        cached_tokens = details.get("cached_tokens") or 0 if isinstance(details, dict) else None
        return cached_tokens if isinstance(cached_tokens, int) else None

    def complete(self, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answer to a completion, as it came."""
        return self._request("POST", "/v1/completions", dict(body), timeout_s)

    def _tokenize(self, body: dict[str, Any]) -> list[int]:
        tokens = self._request("POST", "/tokenize", body).get("tokens")
        if not isinstance(tokens, list) or not all(map(is_token, tokens)):
            raise RenderError(f"{self.url}/tokenize answered without tokens; {self._no_vllm}")
        return tokens

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        response = self._send(method, path, body, timeout_s)
        try:
            value = read_json(response.content, in_turns=self._in_turns)
        except JsonError:
            value = None
        if not isinstance(value, dict):
            raise RenderError(f"{self.url + path} did not answer with a JSON object; {self._no_vllm}")
        return value

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = TIMEOUT_S
    ) -> "httpx.Response":
        import httpx

        timeout = httpx.Timeout(timeout_s, connect=5.0)
        try:
            response = self._http.request(method, path, json=body, timeout=timeout)
        except httpx.TimeoutException as exc:
            raise VllmUnreachableError(self.url, f"{path}: no answer within {timeout_s:g} s", self._names) from exc
        except httpx.TransportError as exc:
            # "[Errno 111] Connection refused": the number does not help an operator.
            reason = re.sub(r"^\[Errno -?\d+\] ", "", str(exc)).lower() or type(exc).__name__
            raise VllmUnreachableError(self.url, reason, self._names) from exc
        except httpx.HTTPError as exc:  # a body that cannot be decompressed
            raise RenderError(f"{self.url + path} did not answer as HTTP servers do ({exc}); {self._no_vllm}") from exc
        if response.is_success:
            return response
        raise RenderError(self._explain(response, self.url + path))

    def _explain(self, response: "httpx.Response", url: str) -> str:
        message, names = _server_message(response), self._names
        if response.status_code in (401, 403):
            if "Authorization" in response.request.headers:
                return (
                    f"{url} refuses the API key ({message}); correct {names['api_key']}, VLLM_API_KEY or OPENAI_API_KEY"
                )
            return (
                f"{url} requires an API key ({message}); pass {names['api_key']}, or set VLLM_API_KEY or OPENAI_API_KEY"
            )
        if response.status_code == 404 and "model" not in message.lower():
            return f"{url} does not exist ({message}); {self._no_vllm}"
        if response.status_code == 400 and url.endswith("/tokenize"):
            return (
                f"vLLM cannot turn this into tokens: {message}. Give it as requests send it: {names['messages=...']} "
                f"with the turns that the chat template requires, or {names['text=...']} if there is no template"
            )
        return f"{url} answered {response.status_code}: {message}"


def _number(label: str | None) -> int:
    return int(label) if label is not None and _NUMBER.fullmatch(label) else 0


def is_token(token: Any) -> bool:
    """Return whether a value is a token id that a request can name."""
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**32


def _text(response: "httpx.Response") -> str:
    """Return the body as UTF-8, which vLLM sends, and ignore the charset of the header."""
    return response.content.decode("utf-8", errors="replace")


def _server_message(response: "httpx.Response") -> str:
    try:
        value = read_json(response.content)
        error = value.get("error", value)
        said = str(error.get("message") or error.get("detail") or error) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        # The status says more than a page of HTML.
        text = _text(response)
        said = response.reason_phrase if text.lstrip().startswith("<") else text
    return cut(" ".join(said.split()) or response.reason_phrase, 2 * SHOWN_CHARS)  # twice: it explains a refusal


def _checked_url(text: str, field: str) -> "httpx.URL":
    """Return a base URL; a user and password in it are sent as HTTP Basic authentication."""
    import httpx

    problem = InvalidArgumentError(field, shown_url(text), "must look like http://127.0.0.1:8000")
    try:
        parts = urlsplit(text)
        # Neither parser refuses port 0, or a name that the resolver cannot encode.
        (parts.hostname or "").encode("idna")
        is_base = parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment
        if not is_base or parts.port == 0:
            raise problem
        return httpx.URL(text)
    except (ValueError, httpx.InvalidURL) as exc:
        raise problem from exc


def _checked_key(api_key: str, field: str) -> str:
    if not (api_key.isascii() and api_key.isprintable()):
        problem = "has a character that no HTTP header can hold (a line break, a letter beyond ASCII)"
        raise InvalidArgumentError(field, "***", f"{problem}; give the key alone")
    return api_key
