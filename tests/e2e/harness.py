"""What the end-to-end tests do with daemon, vLLM and CLI: ask, flood, pin, look."""

import json
import os
import random
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.harness.daemon import CliResult, Daemon, run_cli
from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.process import wait_until
from kvtier._pb.cache_pb2 import DaemonStatus, PromptStatus, SessionStatus
from kvtier.client.admin import AdminClient
from kvtier.verification import Comparison, Completion, compare_live, completion_body, read_completion
from kvtier.vllm_versions import VLLM_SERIES, supports

Tokens = list[int]

TOP_LOGPROBS = 5
ANSWER_TOKENS = 8
FIRST_PLAIN_TOKEN = 16
LAST_PLAIN_TOKEN = 2000
NUM_TAIL_TOKENS = 10
ANSWER_S = 300.0
"""For an answer of vLLM, or a command: only a hang takes as long, also where single steps take ten times as long."""
# For tests beside which another engine runs: on a busy machine the daemon's answer may take more than the default
# 0.25 s, and a promotion from disk longer than computing a small model's prompt. Both make a miss, rightly, but not the
# one that a test is about.
PATIENT = {"lookup_timeout_ms": 10_000, "prefill_tokens_per_s": 20}
# For tests that flood vLLM until it has evicted a pinned prompt: by default it would keep it.
EVICTING = PATIENT | {"gpu_pin": "off"}
TIERS = ("host", "disk")
TELLS_TIERS = supports(metadata.version("vllm"), ("0.32", VLLM_SERIES[-1]))  # else what is restored counts as "host"
needs_tiers = pytest.mark.skipif(not TELLS_TIERS, reason="before 0.32 vLLM does not count tokens by tier")
# On a busy machine a request takes seconds, and so does what the tests note. Only a hang fails.
HANG_S = 60.0
_HOMES: list[Path] = []


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer of vLLM.

    Attributes:
        logprobs: Per generated token, the most probable tokens with their logprobs.
        cached_tokens: Prompt tokens that vLLM did not compute, as the API says.
        by_source: The same from /metrics: device (vLLM's prefix cache), host, disk. Empty for concurrent requests.
        seconds: Until the answer was complete.
    """

    text: str
    logprobs: tuple[Mapping[str, float], ...]
    cached_tokens: int
    by_source: Mapping[str, int]
    seconds: float

    @property
    def restored_tokens(self) -> int:
        """Tokens that came from kvtier."""
        return sum(self.by_source[tier] for tier in TIERS)


def tokens(seed: int, num_tokens: int) -> Tokens:
    """Return random token ids; other seeds differ from the first one on."""
    rng = random.Random(seed)
    return [
        FIRST_PLAIN_TOKEN + seed % 1000,
        *(rng.randint(FIRST_PLAIN_TOKEN, LAST_PLAIN_TOKEN) for _ in range(num_tokens - 1)),
    ]


def ask(
    engine: Engine,
    prompt: Sequence[int],
    *,
    max_tokens: int = ANSWER_TOKENS,
    model: str = "model",
    cache_salt: str = "",
    alone: bool = True,
    url: str = "",
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Complete a prompt of token ids through the openai client, greedily; `url`: by a proxy before the engine."""
    before = engine.cached_by_source() if alone else {}
    extra: dict[str, object] = {"ignore_eos": True} | ({"cache_salt": cache_salt} if cache_salt else {})
    with openai.OpenAI(base_url=f"{url or engine.url}/v1", api_key="none", timeout=ANSWER_S, max_retries=0) as client:
        start_s = time.monotonic()
        completion = client.completions.create(
            model=model,
            prompt=list(prompt),
            max_tokens=max_tokens,
            temperature=0,
            logprobs=TOP_LOGPROBS,
            extra_body=extra,
            extra_headers=headers,
        )
        seconds = time.monotonic() - start_s
    after = engine.cached_by_source() if alone else {}
    choice, usage = completion.choices[0], completion.usage
    assert usage is not None
    assert choice.logprobs is not None
    details = usage.prompt_tokens_details
    return Answer(
        text=choice.text,
        logprobs=tuple(choice.logprobs.top_logprobs or ()),
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        by_source={source: after[source] - before[source] for source in after},
        seconds=seconds,
    )


def ask_all(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int = ANSWER_TOKENS) -> list[Answer]:
    """Ask all at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(engine, prompt, max_tokens=max_tokens, alone=False), prompts))


def as_pinned(prefix: Sequence[int]) -> Tokens:
    """Return the tokens that `Stack.pin` pins for a prefix."""
    return [*prefix, *tokens(len(prefix), NUM_TAIL_TOKENS)]


def proven(engine: Engine, prefix: Sequence[int], own_salt: str = "") -> Comparison:
    """Have the engine compare a pinned prompt with what it computes itself."""

    def complete(*, model: str, tokens: Sequence[int], cache_salt: str, max_tokens: int) -> Completion:
        body = completion_body(model=model, tokens=tokens, cache_salt=cache_salt, max_tokens=max_tokens)
        answer = engine.http.post("/v1/completions", json=body, timeout=ANSWER_S)
        answer.raise_for_status()
        return read_completion(answer.json())

    return compare_live(complete, model="model", tokens=as_pinned(prefix), own_salt=own_salt)


def flood(engine: Engine, seed: int) -> int:
    """Overwrite vLLM's whole KV cache with other prompts; return how many tokens that took."""
    options = engine.options
    wanted = int(options.pool_blocks * options.block_size * 1.2)
    length = options.max_model_len - options.block_size
    sent = 0
    while sent < wanted:
        ask(engine, tokens(seed + sent, length), max_tokens=1)
        sent += length
    return sent


def forget_gpu(engine: Engine, *, reset_external: bool = False) -> None:
    """Empty vLLM's own prefix cache; kvtier keeps what it has, unless it is to be reset too."""

    def is_reset() -> bool:
        answer = engine.http.post("/reset_prefix_cache", params={"reset_external": reset_external})
        answer.raise_for_status()
        # vLLM answers 200 also when it could not, because blocks are still being stored.
        return bool(answer.json()["success"])

    wait_until(is_reset, HANG_S, lambda: f"vLLM to reset its prefix cache\n{engine.log_tail()}")


def ask_until_restored(engine: Engine, prompt: Sequence[int], num_tokens: int, **options: Any) -> Answer:
    """Ask until this many tokens come from kvtier, which vLLM has forgotten; return that answer."""
    answers: list[Answer] = []

    def is_restored() -> bool:
        forget_gpu(engine)
        answers.append(ask(engine, prompt, **options))
        return answers[-1].restored_tokens == num_tokens

    try:
        wait_until(is_restored, HANG_S, f"{num_tokens} tokens to be restored")
    except TimeoutError as error:
        raise TimeoutError(f"{error}; the last answer: {answers[-1]}") from error
    return answers[-1]


def prefix_cache_hit(engine: Engine, prefix: Sequence[int], question: Sequence[int], **options: Any) -> Answer:
    """Return the reference answer: `prefix` from vLLM's prefix cache and nothing else, `question` computed.

    The prefix must end at a block, and this question may not have been asked since the cache was emptied.
    """
    forget_gpu(engine)
    # A little longer than the prefix: with several KV groups vLLM does not hit the last block of a prompt ending there.
    computed = ask(engine, [*prefix, *tokens(len(prefix), NUM_TAIL_TOKENS)], max_tokens=1, **options)
    assert computed.cached_tokens == 0, "the reference must be computed by vLLM"
    answer = ask(engine, [*prefix, *question], **options)
    assert answer.by_source["device"] == answer.cached_tokens == len(prefix), answer
    return answer


def is_of(session: SessionStatus, engine: Engine) -> bool:
    """Say whether an engine has a session: the process that opened it is a child of the engine's leader."""
    with suppress(ProcessLookupError):  # of an engine that is gone
        return os.getpgid(session.pid) == engine.pid
    return False


class Stack:
    """A daemon, and the engines that run beside it one after the other or together."""

    def __init__(
        self,
        home: Path,
        options: EngineOptions,
        host_bytes: str = "512MiB",
        daemon_settings: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare; nothing runs yet. `daemon_settings` are further variables, see `Daemon`."""
        self.home = home
        # Tests say themselves which tier answers: nothing comes to host memory unasked.
        settings = {"TUNED_HOST_PREFETCH": "false", **(daemon_settings or {})}
        self.daemon = Daemon(home, host_bytes=host_bytes, settings=settings)
        # vLLM leaves the sockets of a killed engine behind.
        sockets = {"VLLM_RPC_BASE_PATH": str(home), **options.extra_env}
        self.options = replace(options, kvtier_socket=self.daemon.socket, extra_env=sockets)
        self._num_engines = 0

    @contextmanager
    def engine(self, **changes: Any) -> Iterator[Engine]:
        """Run a vllm serve with the connector."""
        with self.unstarted_engine(**changes) as engine:
            engine.start()
            yield engine

    @contextmanager
    def unstarted_engine(self, **changes: Any) -> Iterator[Engine]:
        """Prepare a vllm serve and end it if somebody starts it."""
        self._num_engines += 1
        engine = Engine(replace(self.options, **changes), self.home / f"vllm-{self._num_engines}.log")
        try:
            yield engine
        finally:
            engine.__exit__(None, None, None)

    def run(self, *args: str, timeout_s: float = ANSWER_S) -> CliResult:
        """Run the CLI."""
        return run_cli(self.daemon.socket, *args, timeout_s=timeout_s)

    def cli(self, *args: str, expect: int = 0, timeout_s: float = ANSWER_S) -> CliResult:
        """Run the CLI and check its exit code."""
        done = self.run(*args, timeout_s=timeout_s)
        assert done.returncode == expect, f"kvtier {' '.join(args)}: {done}\n{self.daemon.log_tail()}"
        return done

    def json(self, *args: str) -> Any:
        """Run a reading command and return its JSON."""
        return json.loads(self.cli(*args, "--json").stdout)

    def pin(self, name: str, prefix: Sequence[int], engine: Engine | None = None, *args: str) -> CliResult:
        """Pin token ids; with an engine they are warmed.

        A few tokens more than the prefix are pinned. They are no whole chunk and never stored; but a warm request hits
        the whole prefix in vLLM's cache, which always computes the last token of a prompt, and with it its block.
        """
        path = self.home / f"{name}.json"
        path.write_text(json.dumps(as_pinned(prefix)))
        if engine is not None:
            self._wait_session(engine)  # the command waits three seconds for one, and else warms nothing
        url = engine.url if engine is not None else "http://127.0.0.1:9"
        return self.cli("pin", name, "--tokens", str(path), "--url", url, *args)

    def store_again(self, name: str, prefix: Sequence[int], engine: Engine, *args: str) -> None:
        """Drop a prompt from kvtier and store it again from vLLM's own blocks, into which it was restored before."""
        before = engine.cached_by_source()
        self.cli("evict", name, "--force")
        self.pin(name, prefix, engine, *args)

        def changed() -> dict[str, int]:
            return {source: num - before[source] for source, num in engine.cached_by_source().items()}

        # The command ends when the prompt is durable, and vLLM may count its request only then.
        wait_until(lambda: changed()["device"] > 0, HANG_S, lambda: f"the warm request to be counted: {changed()}")
        changes = changed()
        # Once per round of warming; a second one comes when the arena slots for storing did not arrive in time.
        assert changes["device"] in (len(prefix), 2 * len(prefix), 3 * len(prefix)), changes
        assert not any(changes[tier] for tier in TIERS), changes

    def admin(self) -> AdminClient:
        """Return a client of the daemon; for polling, where starting the CLI takes too long."""
        return AdminClient(self.daemon.socket, timeout_s=HANG_S)

    def status(self) -> DaemonStatus:
        """Return the daemon's status."""
        with self.admin() as client:
            return client.status()

    def counters(self) -> dict[str, int]:
        """Return the daemon's counters."""
        return dict(self.status().counters)

    def wait_durable(self, name: str, timeout_s: float = HANG_S) -> None:
        """Wait until a prompt is durable."""
        with self.admin() as client:
            wait_until(
                lambda: client.get(name).state == PromptStatus.DURABLE,
                timeout_s,
                lambda: f"{name} to be durable\n{client.get(name)}",
            )

    def ask_until_durable(self, name: str, send: Callable[[], object]) -> float:
        """Send requests for a pinned prompt until it is durable; return how long that took.

        One may not do: the engine may not have bound the pin yet, and what finds no slot in a request's last step is
        offered again by the next one only.
        """

        def is_durable() -> bool:
            send()
            return client.get(name).state == PromptStatus.DURABLE

        with self.admin() as client:
            return wait_until(is_durable, HANG_S, f"{name} to be durable")

    def wait_attached(self, engine: Engine, timeout_s: float = HANG_S, *, since_unix_s: float = 0.0) -> float:
        """Wait until the engine has bound every pin of its model; return how long it took.

        After a reset that reaches kvtier, `since_unix_s` says when that was: the session before it may still stand.
        """
        wait_s = self._wait_session(engine, timeout_s, since_unix_s)
        what = "the engine to bind the pins"
        return wait_s + wait_until(self._is_bound, timeout_s, lambda: f"{what}\n{engine.log_tail()}")

    def _wait_session(self, engine: Engine, timeout_s: float = HANG_S, since_unix_s: float = 0.0) -> float:
        def has_session() -> bool:
            assert engine.is_running, f"vLLM has ended with status {engine.returncode}"
            return any(
                not each.quarantined and each.attached_unix_s >= since_unix_s and is_of(each, engine)
                for each in self.status().sessions
            )

        return wait_until(has_session, timeout_s, lambda: f"the engine to attach\n{engine.log_tail()}")

    def _is_bound(self) -> bool:
        with self.admin() as client:
            return all(prompt.num_engines == prompt.num_confirmed or prompt.error for prompt in client.list())

    def wait_in_host_memory(self, name: str, timeout_s: float = HANG_S) -> float:
        """Wait until every chunk of a prompt is in host memory; return how long it took."""

        def is_there() -> bool:
            with self.admin() as client:
                binding = client.get(name).bindings[-1]
            return bool(binding.num_host_chunks == binding.num_chunks)

        return wait_until(is_there, timeout_s, f"{name} to be in host memory")

    def stored_checksums(self) -> dict[tuple[str, bytes], int]:
        """Return the xxh3 of every chunk on disk, as computed when it was stored, by (namespace, key)."""
        with sqlite3.connect(f"file:{self.daemon.disk_dir / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
            rows = ledger.execute("SELECT namespace_id, key, checksum FROM chunks").fetchall()
        ledger.close()
        return {(namespace, bytes(key)): checksum for namespace, key, checksum in rows}

    def packs(self) -> list[Path]:
        """Return the pack files, the largest first."""
        return sorted(self.daemon.disk_dir.rglob("*.kvpack"), key=lambda path: -path.stat().st_size)


@contextmanager
def running_stack(options: EngineOptions, *, start_daemon: bool = True, **settings: Any) -> Iterator[Stack]:
    """Run a daemon in a folder of its own, and remove everything of it afterwards."""
    home = Path(tempfile.mkdtemp(prefix="kvt-"))
    _HOMES.append(home)
    try:
        stack = Stack(home, options, **settings)
        try:
            if start_daemon:
                stack.daemon.start()
            yield stack
        finally:
            stack.daemon.__exit__(None, None, None)
    except BaseException:
        print(*(f"--- {name}\n{tail}" for name, tail in log_tails()), sep="\n")
        raise
    finally:
        _HOMES.remove(home)
        shutil.rmtree(home, ignore_errors=True)


def log_tails(num_lines: int = 100) -> Iterator[tuple[str, str]]:
    """Yield the end of each log of the stacks that there are now, and its path."""
    for home in _HOMES:
        for path in sorted(home.glob("*.log")):
            yield str(path), "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])
