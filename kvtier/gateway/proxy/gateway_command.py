"""`kvtier-gateway`: the command line, and the server."""

import logging
import socket
import sys
from typing import Annotated, get_args

import httpx
import typer

from kvtier.config.model import LogFormat, LogLevel
from kvtier.config.units import parse_address
from kvtier.errors import ConfigError, KvtierError
from kvtier.gateway.gateway_settings import (
    DEFAULT_MAX_BODY,
    MAX_BODY,
    OWNER_HEADER,
    MarkerSettings,
    checked_header,
    checked_size,
)
from kvtier.obs.log import log_event, setup_logging
from kvtier.printable import printable, shown_url
from kvtier.process import ExitCode, prepare_process
from kvtier.usage_errors import PrintableCommand
from kvtier.version import __version__

DEFAULT_LISTEN = "127.0.0.1:8100"
DEFAULT_UPSTREAM = "http://127.0.0.1:8000"
# Shorter than vLLM's own (VLLM_HTTP_TIMEOUT_KEEP_ALIVE, 5 s): no request goes to a connection that vLLM is closing.
_KEEPALIVE_S = 2.0
_CONNECT_TIMEOUT_S = 5.0
_HELD_BODIES = 16
"""Of the largest size, that all running requests hold together."""

# By name, because `python -m` calls this module __main__.
_log = logging.getLogger("kvtier.gateway.proxy.gateway_command")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def _any(values: object) -> str:
    return f"<{'|'.join(get_args(values))}>"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtier-gateway {__version__}")
        raise typer.Exit


@app.command(cls=PrintableCommand)
def gateway(
    upstream: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            envvar="KVTIER_GATEWAY_UPSTREAM",
            help="Base URL of a vLLM; several times for several, which are chosen by model (in the variable with "
            f"blanks between them) [{DEFAULT_UPSTREAM}]",
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", envvar="KVTIER_GATEWAY_LISTEN", help="Address to listen on")
    ] = DEFAULT_LISTEN,
    owner_header: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            envvar=OWNER_HEADER,
            help="Header that names the owner of pins; only behind a proxy that sets it [the API key's digest]",
        ),
    ] = "",
    max_body: Annotated[str, typer.Option(metavar="SIZE", envvar=MAX_BODY, help="Of a request")] = DEFAULT_MAX_BODY,
    max_requests: Annotated[
        int, typer.Option(metavar="N", envvar="KVTIER_GATEWAY_MAX_REQUESTS", min=1, help="That run at a time")
    ] = 1024,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", envvar="KVTIER_GATEWAY_TIMEOUT", min=1, help="Between two parts of vLLM's answer"
        ),
    ] = 600.0,
    stop_timeout: Annotated[
        int,
        typer.Option(
            metavar="SECONDS", envvar="KVTIER_GATEWAY_STOP_TIMEOUT", min=1, help="For running requests after SIGTERM"
        ),
    ] = 30,
    log_level: Annotated[
        str, typer.Option(metavar=_any(LogLevel), envvar="KVTIER_GATEWAY_LOG_LEVEL", help="Least severe level")
    ] = "info",
    log_format: Annotated[
        str, typer.Option(metavar=_any(LogFormat), envvar="KVTIER_GATEWAY_LOG_FORMAT", help="Log lines as text or JSON")
    ] = "text",
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    """Serve vLLM's API to clients that mark their prompts with cache_control or prompt_cache_* fields.

    Passes every request on to vLLM. For marked ones it tells kvtier's connector what to pin, and reports cache usage
    as the hosted APIs do. GET /health says which vLLM answers.

    Exit codes: 0 stopped, 1 failed, 2 wrong usage or setting.
    """
    try:
        host, port = _checked_address(listen)
        settings = MarkerSettings(
            owner_header=checked_header(owner_header, "--owner-header"),
            max_body_bytes=checked_size(max_body, "--max-body"),
        )
        urls = [_checked_url(url) for url in upstream or [DEFAULT_UPSTREAM]]
        setup_logging(
            _checked_choice("--log-level", log_level, get_args(LogLevel)),
            _checked_choice("--log-format", log_format, get_args(LogFormat)),
        )
        _serve(host, port, urls, settings, max_requests, timeout, stop_timeout)
    except KvtierError as exc:
        typer.echo(printable(f"kvtier-gateway: {exc}"), err=True)
        raise typer.Exit(ExitCode.USAGE if isinstance(exc, ConfigError) else ExitCode.FAILED) from exc


def _serve(
    host: str, port: int, urls: list[httpx.URL], settings: MarkerSettings, max_requests: int, timeout_s: float,
    stop_timeout_s: int,
) -> None:  # fmt: skip
    # Here, so that --help needs no server.
    import uvicorn

    from kvtier.concurrency.header_lines import read_headers_in_linear_time
    from kvtier.concurrency.single_answers import SingleAnswerProtocol
    from kvtier.gateway.prompt_caching import PromptCaching
    from kvtier.gateway.proxy.gateway_server import GatewayServer
    from kvtier.gateway.proxy.request_bounds import RequestBounds
    from kvtier.gateway.proxy.reverse_proxy import ReverseProxy
    from kvtier.gateway.proxy.upstreams import Upstreams

    # RequestBounds bounds the connections: with a bound of its own the pool has none left for /health under full load.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=_KEEPALIVE_S)
    transport = httpx.AsyncHTTPTransport(limits=limits)
    proxy = ReverseProxy(
        Upstreams(urls, transport),
        transport,
        max_body_bytes=settings.max_body_bytes,
        timeouts=httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S),
    )
    app = RequestBounds(
        PromptCaching(proxy, settings),
        max_requests=max_requests,
        max_held_bytes=_HELD_BODIES * settings.max_body_bytes,
        owner_header=settings.owner_header,
    )
    read_headers_in_linear_time()
    config = uvicorn.Config(
        app,
        # httptools, which uvicorn takes where it is installed, reads headers without end, and takes those behind a
        # body (trailers) for the request's own. h11 has a bound of 64 KiB, and drops trailers.
        http=SingleAnswerProtocol,
        lifespan="on",
        log_config=None,
        access_log=False,
        # vLLM's own pass.
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=stop_timeout_s,
    )
    # A warning for each request that is no HTTP: any client could write the log full.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    listener = _bound(host, port)

    def say_ready() -> None:
        log_event(_log, "gateway_ready", listen=f"{host}:{listener.getsockname()[1]}", upstreams=[*map(str, urls)])

    GatewayServer(config, say_ready).serve_until_signal(listener)
    log_event(_log, "gateway_stopped")


def _bound(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as exc:
        problem = f"cannot listen there: {exc.strerror or exc}"
        raise ConfigError("--listen", f"{host}:{port}", "flag", problem) from exc


def _checked_address(text: str) -> tuple[str, int]:
    try:
        return parse_address(text)
    except ValueError as exc:
        raise ConfigError("--listen", text, "flag", str(exc)) from exc


def _checked_choice(option: str, text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise ConfigError(option, text, "flag", f"must be one of {', '.join(choices)}")
    return text


def _checked_url(text: str) -> httpx.URL:
    """Return a base URL; a trailing /v1, which clients need and a proxy does not, is taken off."""
    shown = shown_url(text)
    problem = ConfigError("--upstream", shown, "flag", "must be the base URL of a vLLM, like http://127.0.0.1:8000")
    try:
        url = httpx.URL(text.rstrip("/").removesuffix("/v1"))
    except (httpx.InvalidURL, ValueError) as exc:
        raise problem from exc
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment or url.userinfo:
        raise problem
    return url


def main() -> None:
    """Entry point of the console script."""
    prepare_process("kvtier-gateway")
    sys.exit(app())


if __name__ == "__main__":
    main()
