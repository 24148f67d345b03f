"""What the gateway adds to a request: to one without markers, and to one with them.

usage: python -m benchmarks.gateway_latency [--requests 500]

One vLLM serves a tiny model with the app inside, which a header of each request switches off. The ways take turns,
request by request. Reported is the median of the differences between neighbours, with its 95 % interval: neighbours
share what else the machine did. Requests are answered with one token; or they name a model that vLLM does not have,
which takes the same path up to the engine and shows what is added without the engine's own variation. A marked prompt
is known to the app after its first request; a new one is rendered first.

Then the app's own time, around an app that answers at once: CPU of this thread, without a server.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gateway_latency.switchable import BYPASS
from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import Process, free_port, interrupt_on_signals
from benchmarks.harness.prompts import system_prompt
from benchmarks.measuring.intervals import median_interval
from benchmarks.measuring.machine import machine_line
from kvtier.gateway import PromptCaching
from kvtier.gateway.asgi import App, Message, Receive, Scope, Send, send_json

WARM_UP = 20
CPU_ROUNDS, CPU_CALLS = 15, 200
SIZES = {"1 KiB": 2**10, "100 KiB": 100 * 2**10, "1 MiB": 2**20}


class GatewayProcess(Process):
    """A `kvtier-gateway` in front of a vLLM."""

    def __init__(self, upstream: str, log_path: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        module = "kvtier.gateway.proxy.gateway_command"
        argv = [sys.executable, "-m", module, "--listen", f"127.0.0.1:{port}", "--upstream", upstream]
        super().__init__("kvtier-gateway", argv, {}, log_path)

    def start(self) -> None:
        """Start it and wait until it answers."""
        super().start()
        self.wait_ready(self._answers, 60)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").is_success
        except httpx.TransportError:
            return False


def chat_body(*, is_marked: bool, model: str = "model", first: str = "") -> bytes:
    """Return a request of a system prompt, which begins with `first`, and a question; it is answered with one token."""
    part: dict[str, Any] = {"type": "text", "text": f"{first}{system_prompt(0)[:2000]}"}
    part |= {"cache_control": {"type": "ephemeral"}} if is_marked else {}
    turns = [{"role": "system", "content": [part]}, {"role": "user", "content": "Where is my order?"}]
    return json.dumps({"model": model, "messages": turns, "max_tokens": 1, "temperature": 0}).encode()


def compare_turns(ways: dict[str, Callable[[], None]], num_requests: int) -> dict[str, list[float]]:
    """Return milliseconds per request of each way; they take turns."""
    for way in ways.values():
        for _ in range(WARM_UP):
            way()
    samples: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(num_requests):
        for name in names if turn % 2 == 0 else reversed(names):
            began_s = time.perf_counter()
            ways[name]()
            samples[name].append((time.perf_counter() - began_s) * 1e3)
    return samples


def served(num_requests: int, home: Path) -> list[str]:
    """Return a row for each way to a serving vLLM."""
    middleware = ("--middleware", "benchmarks.gateway_latency.switchable.Switchable")
    options = EngineOptions(
        model=str(cached_model("tiny", TINY)), max_model_len=4096, pool_blocks=400, extra_args=middleware
    )
    with (
        Engine(options, home / "vllm.log") as engine,
        GatewayProcess(engine.url, home / "gateway.log") as gateway,
        httpx.Client(timeout=60) as client,
    ):
        rows = []
        for label, ways in _groups(client, engine.url, gateway.url).items():
            samples = compare_turns(ways, num_requests)
            alone = samples["vLLM alone"]
            rows += [_served_row(f"{label}: {name}", taken, alone) for name, taken in samples.items()]
    return rows


def _groups(client: httpx.Client, vllm_url: str, gateway_url: str) -> dict[str, dict[str, Callable[[], None]]]:
    """Return the ways that take turns, by what is asked; the first of each is vLLM alone."""
    numbers = itertools.count()

    def way(url: str, body: Callable[[], bytes], *, bypass: bool = False) -> Callable[[], None]:
        fields = {"content-type": "application/json", "authorization": "Bearer key"}
        fields |= {BYPASS: "1"} if bypass else {}

        def ask() -> None:
            client.post(f"{url}/v1/chat/completions", content=body(), headers=fields)

        return ask

    def same(**fields: Any) -> Callable[[], bytes]:
        body = chat_body(**fields)
        return lambda: body

    def new(*, is_marked: bool) -> Callable[[], bytes]:
        return lambda: chat_body(is_marked=is_marked, first=f"Number {next(numbers)}. ")

    plain, marked, refused = (
        same(is_marked=False), same(is_marked=True), same(is_marked=False, model="another"),
    )  # fmt: skip
    return {
        "refused": {
            "vLLM alone": way(vllm_url, refused, bypass=True),
            "app in vLLM, no marker": way(vllm_url, refused),
            "gateway, no marker": way(gateway_url, refused, bypass=True),
        },
        "one token": {
            "vLLM alone": way(vllm_url, plain, bypass=True),
            "app in vLLM, no marker": way(vllm_url, plain),
            "app in vLLM, marked": way(vllm_url, marked),
            "gateway, no marker": way(gateway_url, plain, bypass=True),
        },
        "one token, new prompt": {
            "vLLM alone": way(vllm_url, new(is_marked=False), bypass=True),
            "app in vLLM, marked": way(vllm_url, new(is_marked=True)),
        },
    }


def _served_row(name: str, taken: Sequence[float], alone: Sequence[float]) -> str:
    added = median_interval([ours - theirs for ours, theirs in zip(taken, alone, strict=True)])
    shown = "" if taken is alone else f"{added.median:+.2f} ({added.low:+.2f} to {added.high:+.2f})"
    return f"| {name} | {statistics.median(taken):.2f} | {shown} |"


async def own_time() -> list[str]:
    """Return a row for the app's own time per size of the body."""
    rows = []
    for label, size in SIZES.items():
        text = "word " * (size // 5)
        turns = [{"role": "user", "content": text}]
        plain = json.dumps({"model": "m", "messages": turns}).encode()
        marked = json.dumps({"model": "m", "messages": turns, "prompt_cache_key": "k"}).encode()
        app = PromptCaching(_answers_at_once)
        cells = []
        for body in (plain, marked):
            bare = await _microseconds(_answers_at_once, body)
            cells.append(f"{await _microseconds(app, body) - bare:.0f} us")
        rows.append(f"| {label} | {' | '.join(cells)} |")
    return rows


async def _microseconds(app: App, body: bytes) -> float:
    path = "/v1/chat/completions"
    fields = [(b"content-type", b"application/json"), (b"authorization", b"Bearer key")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": fields}

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        pass

    samples = []
    for _ in range(CPU_ROUNDS):
        began_s = time.thread_time()
        for _ in range(CPU_CALLS):
            await app(dict(scope), receive, send)
        samples.append((time.thread_time() - began_s) / CPU_CALLS * 1e6)
    return statistics.median(samples)


async def _answers_at_once(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 1}}
    value = {"token_ids": [1]} if scope["path"].endswith("/render") else {"usage": usage}
    await send_json(send, 200, value)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    num_requests = parser.parse_args().requests
    interrupt_on_signals()
    print(machine_line())
    with tempfile.TemporaryDirectory(prefix="kvg-") as home:
        print("\n| way | median ms | added ms (95 % interval) |\n|---|---|---|")
        for row in served(num_requests, Path(home)):
            print(row)
    print("\n| body | own time, no marker | own time, marked |\n|---|---|---|")
    for row in asyncio.run(own_time()):
        print(row)


if __name__ == "__main__":
    main()
