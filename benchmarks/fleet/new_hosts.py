"""A host that has nothing, until it has the fleet's prompts; and what a request pays there, beside other tiers.

usage: python -m benchmarks.fleet.new_hosts [--store folder|moto|ceph] [--mib 1024] [--rounds 5] [--part warm|requests]

Real daemons, one of them new in each round: nothing on its disk, nothing in its memory. The store is a folder, moto's
S3 server or Ceph's gateway (`make test-fleet` says what that needs), on this machine, its objects in memory.

- `warm`: 8 pinned prompts of `--mib` together, bfloat16 noise, which the first host has stored and uploaded. A
  scripted engine attaches to each new host and binds each pin that it is sent. Times count from before the daemon is
  started until `kvtier ready --tier host` has ended; then every byte of one prompt is compared.
- `requests`: a real vLLM and prompts of 1,000 and 3,000 tokens. Each round asks for each of them, with new questions:
  not known yet; from host memory; from disk, the packs dropped from the page cache; and after the daemon was killed and
  everything that it had was removed, once the new one is ready.
"""

import argparse
import asyncio
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from benchmarks.harness.daemon import Daemon, run_cli, wait_attached
from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import SERVED
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import interrupt_on_signals, say, wait_until
from benchmarks.measuring.chat_requests import ask, forget_device_cache, greet, question
from benchmarks.measuring.daemon_fixtures import KVEngine, config_for_engine, one_group
from benchmarks.measuring.machine import fast_dtype, machine_line, spread
from benchmarks.measuring.sized_prompts import SystemPrompt, make_prompt
from benchmarks.measuring.storage import drop_page_cache
from benchmarks.measuring.tables import milliseconds, table
from benchmarks.systems.kvtier_system import OFF_DEVICE_CONFIG, KVTier
from kvtier import Client
from kvtier.core.layout import ChunkKey
from tests.fakes.ceph_rgw import ceph_rgw
from tests.fakes.s3_server import CREDENTIALS, make_bucket, s3_server
from tests.fakes.scripted_engine import chunk_key

MIB = 1024**2
NUM_PROMPTS = 8
CHUNK_BYTES = 2 * MIB
CHUNK_TOKENS = 16
LENGTHS = (1000, 3000)
BLOCK_TOKENS = 32
READY_S = 300
Times = dict[str, list[float]]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--store", choices=("folder", "moto", "ceph"), default="folder")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", choices=("warm", "requests", "all"), default="all")
    options = parser.parse_args()
    interrupt_on_signals()
    print(f"{machine_line()}; the store: {options.store}")
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-fleet-") as name,
        store_settings(options.store, Path(name)) as given,
    ):
        if options.part != "requests":
            warm_hosts(Path(name), _place_in(given, "warm"), options.mib, options.rounds)
        if options.part != "warm":
            requests(Path(name) / "requests", _place_in(given, "requests"), options.rounds)


@contextmanager
def store_settings(kind: str, home: Path) -> Iterator[dict[str, str]]:
    """Run a store; yields the variables by which daemons find it."""
    settings = {"KVTIER_REMOTE_POLL": "1s", "KVTIER_DISK_BYTES": "8GiB"}
    if kind == "folder":
        (home / "store").mkdir()
        yield settings | {"KVTIER_REMOTE_URL": f"file://{home / 'store'}"}
        return
    with ceph_rgw() if kind == "ceph" else s3_server() as url:
        make_bucket(url, "fleet")
        yield settings | CREDENTIALS | {"KVTIER_REMOTE_URL": "s3://fleet/hosts", "AWS_ENDPOINT_URL": url}


def _place_in(settings: Mapping[str, str], part: str) -> dict[str, str]:
    """Return the settings with a place of its own in the store."""
    return {**settings, "KVTIER_REMOTE_URL": f"{settings['KVTIER_REMOTE_URL']}/{part}"}


def prompt_keys(num_chunks: int) -> dict[str, list[ChunkKey]]:
    """Return the chunks of each prompt."""
    return {f"prompt-{n}": [chunk_key((n, each)) for each in range(num_chunks)] for n in range(NUM_PROMPTS)}


def warm_hosts(home: Path, settings: Mapping[str, str], mib: int, num_rounds: int) -> None:
    """Measure how long new hosts take."""
    prompts = prompt_keys(mib * MIB // CHUNK_BYTES // NUM_PROMPTS)
    num_bytes = sum(map(len, prompts.values())) * CHUNK_BYTES
    seconds = []
    with Daemon(_new_folder(home / "first"), host_bytes=str(2 * num_bytes), settings=settings) as first:
        asyncio.run(compute(first, prompts))
        say("the first host has uploaded its prompts")
        for number in range(num_rounds):
            new = Daemon(_new_folder(home / f"new-{number}"), host_bytes=str(2 * num_bytes), settings=settings)
            seconds.append(asyncio.run(warm_host(new, prompts)))
            shutil.rmtree(new.home)
            say(f"ready after {seconds[-1]:.2f} s")
    rates = [num_bytes / 1024**3 / each for each in seconds]
    print(
        f"{NUM_PROMPTS} prompts, {num_bytes // MIB} MiB in chunks of {CHUNK_BYTES // MIB} MiB; {num_rounds} new hosts"
    )
    print(f"from the daemon's start to `kvtier ready`: {spread(seconds, 's')}, {spread(rates, 'GiB/s')}")


async def compute(daemon: Daemon, prompts: Mapping[str, Sequence[ChunkKey]]) -> None:
    """Pin and store the prompts on the first host, and wait until the store has them."""
    with Client(daemon.socket) as client:
        async with KVEngine(config_for_engine(daemon), one_group(CHUNK_BYTES)) as engine:
            for number, (name, keys) in enumerate(prompts.items()):
                tokens = [number, *range(1, CHUNK_TOKENS * len(keys))]
                prompt = await asyncio.to_thread(client.pin, name, tokens=tokens, warm=False)
                await engine.bind(prompt.pin_id, keys)
                await engine.store(keys)
            await asyncio.to_thread(
                wait_until, lambda: client.remote().num_kv_objects == len(prompts), READY_S, "the KV to be uploaded"
            )


async def warm_host(daemon: Daemon, prompts: Mapping[str, Sequence[ChunkKey]]) -> float:
    """Start a daemon that has nothing and return the seconds until `kvtier ready`; all of one prompt is verified."""
    began_s = time.monotonic()
    with daemon:
        async with KVEngine(config_for_engine(daemon), one_group(CHUNK_BYTES)) as engine:
            binding = asyncio.create_task(bind_all(engine, prompts))
            ready = await asyncio.to_thread(
                run_cli, daemon.socket, "ready", "--tier", "host", "--timeout", str(READY_S), timeout_s=READY_S + 10
            )
            ready_s = time.monotonic() - began_s
            assert ready.returncode == 0, ready.stdout
            await binding
            for number, keys in enumerate(prompts.values()):
                if number:
                    found = sorted(await engine.acquire(1 + number, keys))
                    await engine.release(1 + number)
                else:
                    found = await engine.verify(1, keys)
                assert found == list(range(len(keys))), "it was not in host memory"
    return ready_s


async def bind_all(engine: KVEngine, prompts: Mapping[str, Sequence[ChunkKey]]) -> None:
    """Bind each pin, as vLLM's connector does."""
    pins = list(engine.welcome.pins)
    num_bound = 0
    while num_bound < len(prompts):
        for pin in pins:
            await engine.bind(pin.pin_id, prompts[pin.name])
        num_bound += len(pins)
        pins = await engine.receive_pins() if num_bound < len(prompts) else []


def requests(home: Path, settings: Mapping[str, str], num_rounds: int) -> None:
    """Measure times to first token, and print them."""
    model = cached_model("suite-8x512", SERVED)
    options = EngineOptions(
        model=str(model),
        connector_config=OFF_DEVICE_CONFIG,
        max_model_len=max(LENGTHS) + 1024,
        block_size=BLOCK_TOKENS,
        pool_blocks=sum(LENGTHS) // BLOCK_TOKENS + 128,
        max_batched_tokens=4096,
        dtype=fast_dtype(),
    )
    system = KVTier(home, options)
    for name, value in settings.items():
        system.daemon.set_variable(name, value)
    times: dict[int, Times] = {tokens: defaultdict(list) for tokens in LENGTHS}
    ready_s: list[float] = []
    with system.server(), system.engine() as engine:
        greet(engine)
        questions = map(question, count())
        for number in range(num_rounds + 1):
            if number == 1:  # the first round warms everything
                ready_s.clear()
                times = {tokens: defaultdict(list) for tokens in LENGTHS}
            prompts = [make_prompt(model, tokens, number * len(LENGTHS) + n) for n, tokens in enumerate(LENGTHS)]
            ready_s.append(one_round(system, engine, prompts, questions, times))
            say(f"round {number}: ready after {ready_s[-1]:.2f} s")
    system.clean_up()
    print(f"{num_rounds} rounds; a new host was ready {spread(ready_s, 's')} after its daemon's start")
    columns = list(times[LENGTHS[0]])
    rows = [[f"{tokens}", *(milliseconds(times[tokens][each]) for each in columns)] for tokens in LENGTHS]
    print(table(("tokens; TTFT in ms", *columns), rows))


def one_round(
    system: KVTier, engine: Engine, prompts: Sequence[SystemPrompt], questions: Iterator[str], times: dict[int, Times]
) -> float:
    """Ask for these new prompts in each state; return how long a new host took to be ready."""
    daemon = system.daemon

    def ask_all(state: str) -> None:
        greet(engine)
        forget_device_cache(engine)
        for prompt in prompts:
            answer = ask(engine, [], prompt.messages(next(questions)))
            is_right = answer.cached_tokens < 0.1 * prompt.tokens if state == "computed" else answer.by_source
            assert is_right, f"{state}: {answer.by_source}"
            assert state == "computed" or answer.cached_tokens > 0.9 * prompt.tokens, answer.by_source
            times[prompt.tokens][state].append(answer.ttft_s)

    ask_all("computed")
    with Client(daemon.socket) as client:
        for prompt in prompts:
            system.keep(engine, prompt.name, prompt.text)
        names = {prompt.name for prompt in prompts}
        wait_until(lambda: client.remote().num_kv_objects >= client.remote().num_pins, 60, "the KV to be uploaded")
        ask_all("from host memory")
        for name in names:
            evicted = run_cli(daemon.socket, "evict", name, "--tier", "host")
            assert evicted.returncode == 0, evicted.stderr
        drop_page_cache(daemon.disk_dir)
        ask_all("from disk")
    daemon.kill()
    daemon.lose_memory()
    shutil.rmtree(daemon.disk_dir)
    began_s = time.monotonic()
    daemon.start()
    wait_attached(daemon)
    ready = run_cli(daemon.socket, "ready", "--tier", "host", "--timeout", str(READY_S), timeout_s=READY_S + 10)
    ready_s = time.monotonic() - began_s
    assert ready.returncode == 0, ready.stdout
    ask_all("a new host, ready")
    with Client(daemon.socket) as client:  # the next round's host brings its own prompts only
        for prompt in prompts:
            client.unpin(prompt.name)
    return ready_s


def _new_folder(path: Path) -> Path:
    path.mkdir(mode=0o700)
    return path


if __name__ == "__main__":
    main()
