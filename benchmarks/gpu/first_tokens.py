"""Times to first token by where a prompt's KV comes from, and what a connector that has nothing to do costs."""

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.gpu.dummy_model import VOCAB_SIZE, host_bytes, write_model
from benchmarks.gpu.gpu_servers import Connector, GpuDaemon, GpuEngine, ServerOptions
from benchmarks.harness.daemon import wait_attached
from benchmarks.measuring.chat_requests import forget_device_cache, streamed_event
from benchmarks.measuring.machine import spread

ANSWER_TOKENS = 4
STORE_WAIT_S = 1.0
QUESTION_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class GpuPlan:
    """What to measure.

    Attributes:
        shape: Of the model.
        prompt_lengths: Tokens.
        num_prompts: Of each length; each is sent once per stage, so this is the number of samples.
        load_requests: Of the load that finds nothing kept.
        load_concurrency: At once.
        extra_args: For vLLM.
    """

    shape: str
    prompt_lengths: tuple[int, ...]
    num_prompts: int
    load_requests: int
    load_concurrency: int
    extra_args: tuple[str, ...]


@dataclass(kw_only=True)
class Samples:
    """Seconds to the first token, and prompt tokens that were not computed, by (system, stage, length)."""

    ttft_s: dict[tuple[Connector, str, int], list[float]] = field(default_factory=dict)
    cached: dict[tuple[Connector, str, int], list[int]] = field(default_factory=dict)

    def report(self, lengths: tuple[int, ...]) -> None:
        """Print medians, spread and ratios to cold and to OffloadingConnector."""
        stages = list(dict.fromkeys(stage for _, stage, _ in self.ttft_s))
        for length in lengths:
            print(f"\nprompt of {length} tokens, seconds to the first token: median (min..max)")
            cold = statistics.median(self.ttft_s[Connector.NONE, "cold", length])
            for stage in stages:
                peers = self.ttft_s.get((Connector.OFFLOADING, stage, length))
                for system in Connector:
                    if (values := self.ttft_s.get((system, stage, length))) is None:
                        continue
                    median = statistics.median(values)
                    beside = f", {median / statistics.median(peers):.2f} of OffloadingConnector" if peers else ""
                    cached = min(self.cached[system, stage, length])
                    print(
                        f"{stage:22} {system.value:20} {spread(values, 's', 3)}, {median / cold:.3f} of cold{beside}; "
                        f"at least {cached} tokens not computed"
                    )


class Recorder:
    """Writes samples to a file of JSON lines as they are measured, so that a run that is cut leaves them."""

    def __init__(self, path: Path | None) -> None:
        """Add to a file, which need not exist; None: to none."""
        self._path = path

    def add(self, **fields: object) -> None:
        """Write one sample."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(fields) + "\n")


def measure_first_tokens(folder: Path, plan: GpuPlan, recorder: Recorder) -> Samples:
    """Measure every stage of every system."""
    samples = Samples()
    for connector in Connector:
        _measure_system(folder / connector.name.lower(), plan, connector, samples, recorder)
    return samples


def _measure_system(folder: Path, plan: GpuPlan, connector: Connector, samples: Samples, recorder: Recorder) -> None:
    prompts = {
        length: [_tokens(f"{length} {number}", length) for number in range(plan.num_prompts)]
        for length in plan.prompt_lengths
    }
    num_bytes = _host_bytes(plan)
    daemon = GpuDaemon(folder / "daemon", num_bytes, 2 * num_bytes, stores_all=True)
    options = _options(folder, plan, connector, daemon.socket, num_bytes)

    def ask_all(server: GpuEngine, stage: str) -> None:
        for length, of_length in prompts.items():
            for number, prompt in enumerate(of_length):
                seconds, cached = ask(server, [*prompt, *_tokens(f"{stage} {number}", QUESTION_TOKENS)])
                samples.ttft_s.setdefault((connector, stage, length), []).append(seconds)
                samples.cached.setdefault((connector, stage, length), []).append(cached)
                recorder.add(system=connector.value, stage=stage, length=length, ttft_s=seconds, cached_tokens=cached)

    with daemon:
        with GpuEngine(options, folder / "vllm.log") as server:
            greet(server)
            ask_all(server, "cold")
            ask_all(server, "GPU hit")
            if connector is Connector.NONE:
                return
            time.sleep(STORE_WAIT_S)
            forget_device_cache(server)
            ask_all(server, "host hit")
            if connector is Connector.KVTIER:
                _pin(daemon, server, prompts)
                daemon.cli("evict", "--all", "--tier", "host", "--force")
                forget_device_cache(server)
                ask_all(server, "disk hit")
        with GpuEngine(options, folder / "vllm-2.log") as server:
            greet(server)
            ask_all(server, "restart of vLLM")
            if connector is Connector.KVTIER:
                daemon.kill()
                daemon.start()
                wait_attached(daemon)
                forget_device_cache(server)
                ask_all(server, "kill -9 of the daemon")


def _pin(daemon: GpuDaemon, server: GpuEngine, prompts: dict[int, list[list[int]]]) -> None:
    """Bring every prompt to disk."""
    for length, of_length in prompts.items():
        for number, prompt in enumerate(of_length):
            path = daemon.home / f"{length}-{number}.json"
            path.write_text(json.dumps(prompt))
            daemon.cli("pin", path.stem, "--tokens", str(path), "--url", server.url)


def measure_idle(folder: Path, plan: GpuPlan, num_rounds: int, recorder: Recorder) -> None:
    """Print throughput and inter-token latency while no prompt comes twice.

    kvtier stores pinned prompts only, and there are none; OffloadingConnector stores all that it is offered.
    """
    tokens_per_s: dict[Connector, list[float]] = {each: [] for each in Connector}
    itl_ms: dict[Connector, list[float]] = {each: [] for each in Connector}
    for number in range(num_rounds):
        for connector in Connector:  # they take turns
            home = folder / f"{connector.name.lower()}-{number}"
            daemon = GpuDaemon(home / "daemon", _host_bytes(plan), 2**30, stores_all=False)
            options = _options(home, plan, connector, daemon.socket, _host_bytes(plan))
            with daemon, GpuEngine(options, home / "vllm.log") as server:
                greet(server)
                rate, latency = asyncio.run(_load(server, plan))
                tokens_per_s[connector].append(rate)
                itl_ms[connector].append(latency)
                recorder.add(system=connector.value, round=number, tokens_per_s=rate, itl_ms=latency)
    print(f"\n{plan.load_requests} requests, {plan.load_concurrency} at once, {num_rounds} rounds: median (min..max)")
    alone_rate, alone_itl = (statistics.median(each[Connector.NONE]) for each in (tokens_per_s, itl_ms))
    for connector in Connector:
        rate, itl = (statistics.median(each[connector]) for each in (tokens_per_s, itl_ms))
        print(
            f"{connector.value:20} {spread(tokens_per_s[connector], 'tokens/s', 0)} ({rate / alone_rate:.3f}), "
            f"{spread(itl_ms[connector], 'ms')} between tokens ({itl / alone_itl:.3f})"
        )


def ask(server: GpuEngine, prompt: list[int]) -> tuple[float, int]:
    """Send one prompt; return the seconds to its first token, and how many of its tokens were not computed."""
    body = {"model": "model", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    began_s, first_s, cached = time.perf_counter(), 0.0, 0
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for event in filter(None, map(streamed_event, answer.iter_lines())):
            if event["choices"] and not first_s:
                first_s = time.perf_counter() - began_s
            details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens") or cached
    return first_s, cached


def greet(server: GpuEngine) -> None:
    """Run both kinds of step once, so that lazy imports and compilations are not measured."""
    ask(server, _tokens("greeting", 2048))
    ask(server, _tokens("greeting", 2048))


async def _load(server: GpuEngine, plan: GpuPlan) -> tuple[float, float]:
    """Return output tokens per second, and the mean milliseconds between tokens."""
    turns = asyncio.Semaphore(plan.load_concurrency)
    gaps: list[float] = []
    num_tokens = 0

    async def one(client: httpx.AsyncClient, number: int) -> None:
        nonlocal num_tokens
        body = {"model": "model", "prompt": _tokens(f"load {number}", 512), "max_tokens": 128, "ignore_eos": True}
        async with turns, client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            last_s = 0.0
            async for line in answer.aiter_lines():
                if event := streamed_event(line):
                    now_s = time.perf_counter()
                    if last_s and event["choices"]:
                        gaps.append(now_s - last_s)
                    last_s = now_s
                    num_tokens += bool(event["choices"])

    began_s = time.perf_counter()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        await asyncio.gather(*(one(client, number) for number in range(plan.load_requests)))
    return num_tokens / (time.perf_counter() - began_s), 1000 * statistics.mean(gaps)


def _options(folder: Path, plan: GpuPlan, connector: Connector, socket: Path, num_bytes: int) -> ServerOptions:
    model = folder / "model"
    write_model(model, plan.shape)
    return ServerOptions(
        model=str(model),
        connector=connector,
        socket=socket,
        host_bytes=num_bytes,
        max_model_len=max(plan.prompt_lengths) + 1024,
        extra_args=plan.extra_args,
    )


def _host_bytes(plan: GpuPlan) -> int:
    return host_bytes(plan.shape, plan.prompt_lengths, plan.num_prompts)


def _tokens(seed: str, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB_SIZE) for _ in range(num_tokens)]
