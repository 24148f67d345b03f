"""Prompts from a file through their life on a real vLLM: before any runs, replaced under traffic, after other weights.

The tests of this file run in order, on one daemon and one engine after the other. The engines find their API server.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import openai
import pytest

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import make_model
from benchmarks.harness.process import wait_until
from kvtier import Prompt, PromptState
from kvtier.library.client import Client
from tests.e2e.conftest import Note
from tests.e2e.harness import ANSWER_S, PATIENT, Stack, forget_gpu, running_stack

FIRST, SECOND = (
    "You are the support bot of a company that sells parrots. " * 12,
    "You sell ravens, and only ravens. " * 20,
)
FAQ = "Questions and answers about parrots. " * 15


@dataclass
class World:
    """What the tests share."""

    stack: Stack
    engines: ExitStack
    model: Path
    file: Path
    engine: Engine | None = None
    client: Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = Client(self.stack.daemon.socket)

    def declare(self, support: str) -> None:
        """Write the file of prompts."""
        (self.file.parent / "support.txt").write_text(support)
        self.file.write_text(
            "set: team\ndefaults: {owner: support, labels: {team: support}}\n"
            "prompts:\n  - {name: support, system_file: support.txt, priority: 5}\n"
            f'  - {{name: faq, system: "{FAQ}"}}\n'
        )

    def start_engine(self) -> Engine:
        """End the engine and start one."""
        self.engines.close()
        self.engine = self.engines.enter_context(self.stack.engine(warm_start=True, model=str(self.model)))
        return self.engine

    def apply(self, *args: str, expect: int = 0) -> str:
        """Run `kvtier apply`."""
        url = self.engine.url if self.engine is not None else "http://127.0.0.1:9"
        return self.stack.cli("apply", "-f", str(self.file), "--url", url, *args, expect=expect).stdout

    def state(self, name: str) -> PromptState:
        return self.client.get(name).state

    def wait(self, name: str, *states: PromptState) -> Prompt:
        """Wait until a prompt has one of these states."""
        assert self.engine is not None
        engine = self.engine
        wait_until(
            lambda: self.state(name) in states,
            180,
            lambda: f"{name} to be {states}, not {self.state(name)}\n{engine.log_tail()}",
        )
        return self.client.get(name)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("declared")
    make_model(folder / "model", TINY)
    options = EngineOptions(
        model=str(folder / "model"), max_batched_tokens=256, connector_config=PATIENT | {"warm_url": "auto"}
    )
    with running_stack(options) as stack, ExitStack() as engines:
        made = World(stack, engines, folder / "model", folder / "prompts.yaml")
        with made.client:
            yield made


def chat(engine: Engine, system: str, question: str) -> int:
    """Ask with a system prompt; return the prompt's tokens that vLLM did not compute."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", timeout=ANSWER_S, max_retries=0) as client:
        answer = client.chat.completions.create(model="model", messages=messages, max_tokens=2)
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return (details.cached_tokens or 0) if details else 0


def restored(engine: Engine, system: str) -> int:
    """Return how many tokens of a chat vLLM had not to compute after its prefix cache was emptied.

    They came from kvtier: for this request, or for a warm start just before it.
    """
    before = engine.cached_by_source()  # a warm start begins as soon as vLLM has forgotten
    forget_gpu(engine)
    num_cached = chat(engine, system, "What do you sell?")
    after = engine.cached_by_source()
    assert sum(after[tier] - before[tier] for tier in ("host", "disk")) >= num_cached
    return num_cached


@contextmanager
def traffic(engine: Engine, *systems: str) -> Iterator[Counter[str]]:
    """Ask all the time, as users would; yield what became of the requests."""
    ends, outcomes = threading.Event(), Counter[str]()

    def ask_on() -> None:
        number = 0
        while not ends.is_set():
            number += 1
            try:
                cached = chat(engine, systems[number % len(systems)], f"Question {number}?")
                outcomes["cached" if cached else "computed"] += 1
            except openai.OpenAIError as exc:
                outcomes[repr(exc)] += 1

    thread = threading.Thread(target=ask_on)
    thread.start()
    try:
        yield outcomes
    finally:
        ends.set()
        thread.join()


def test_what_was_applied_before_any_vllm_ran_is_ready_without_a_hand(world: World, note: Note) -> None:
    world.declare(FIRST)
    assert "2 new" in world.apply()
    assert {prompt.state for prompt in world.client.list()} == {PromptState.UNRENDERED}
    engine = world.start_engine()
    for name in ("support", "faq"):
        world.wait(name, PromptState.DURABLE)
    assert "2 unchanged" in world.apply("--detailed-exitcode")
    num_restored = restored(engine, FIRST)
    note(f"first request after that: {num_restored} tokens restored of {world.client.get('support').num_tokens}")
    assert num_restored > 100


def test_a_replacement_under_traffic_is_served_throughout(world: World, note: Note) -> None:
    """Both texts are asked for all the time; no request fails, and the name always has a pin that is durable."""
    engine = world.engine
    assert engine is not None
    world.declare(SECOND)
    assert "+You sell ravens" in world.apply("--dry-run", "--detailed-exitcode", expect=4)
    ends, states = threading.Event(), Counter[str]()

    def watch() -> None:
        while not ends.wait(0.02):
            prompt = world.client.get("support")
            states[f"{prompt.pinned} {prompt.state}"] += 1

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with traffic(engine, FIRST, SECOND) as outcomes:
            assert "1 replaced" in world.apply()
            wait_until(lambda: outcomes["cached"] > 20, 300, lambda: f"21 requests to be restored: {outcomes}")
    finally:
        ends.set()
        watcher.join()
    note(f"requests: {dict(outcomes)}; states seen under the name: {dict(states)}")
    assert set(states) == {"True durable"}
    assert set(outcomes) <= {"cached", "computed"}
    assert [prompt.name for prompt in world.client.history("support")] == ["support@1", "support"]
    assert restored(engine, SECOND) > 100
    assert restored(engine, FIRST) > 100, "the version before is cache still"


def test_other_weights_make_pins_stale_until_the_engine_has_computed_them(world: World, note: Note) -> None:
    """No user asks for them meanwhile: a new version of the model is warm before it takes traffic."""
    world.engines.close()
    make_model(world.model, replace(TINY, seed=7))
    wait_until(lambda: not world.client.get("support").num_engines, 60, "the session of the old engine to end")
    seen: list[str] = []

    def is_durable() -> bool:
        prompt = world.client.get("support")
        if prompt.num_engines and prompt.state.value not in seen:
            seen.append(prompt.state.value)
        return bool(prompt.num_engines) and prompt.state is PromptState.DURABLE

    with ThreadPoolExecutor(1) as pool:
        # Looked at all the while: the engine attaches, and may have computed it, before we see that vLLM is up.
        waiting = pool.submit(wait_until, is_durable, 420, lambda: f"support to be durable; {seen}")
        engine = world.start_engine()
        waiting.result()
    world.wait("faq", PromptState.DURABLE)
    note(f"states while the engine computed it: {seen}")
    assert {"stale", "refreshing"} & set(seen)
    num_restored = restored(engine, SECOND)
    note(f"first request: {num_restored} tokens restored")
    assert num_restored > 100


def test_readiness_of_vllms_own_prefix_cache(world: World) -> None:
    engine, ready = world.engine, ("ready", "support", "--tier", "device", "--timeout")
    assert engine is not None
    forget_gpu(engine)  # the connector warms it again, soon
    assert "are on disk and in vLLM's prefix cache" in world.stack.cli(*ready, "180").stdout
    chat(engine, SECOND, "What do you sell?")
    assert world.stack.json(*ready, "180")["ready"]


def test_weights_loaded_in_place_make_pins_stale_until_they_are_computed_again(world: World, note: Note) -> None:
    """Nothing reaches the disk then, so a pin is as durable as that engine's memory."""
    engine = world.engine
    assert engine is not None
    make_model(world.model, replace(TINY, seed=9))
    engine.http.post("/collective_rpc", json={"method": "reload_weights"}).raise_for_status()
    forget_gpu(engine, reset_external=True)
    seen: list[str] = []

    def is_computed() -> bool:
        prompt = world.client.get("support")
        if prompt.state.value not in seen:
            seen.append(prompt.state.value)
        here = [binding for binding in prompt.bindings if binding.live and binding.ephemeral]
        return prompt.state is PromptState.DURABLE and bool(here)

    wait_until(is_computed, 180, lambda: f"support to be computed again; {seen}\n{engine.log_tail()}")
    note(f"states after weights were loaded in place: {seen}")
    num_restored = restored(engine, SECOND)
    note(f"first request: {num_restored} tokens restored")
    assert num_restored > 100
    world.engines.close()
    world.start_engine()
    world.wait("support", PromptState.DURABLE)


def test_a_rollback_brings_the_text_before(world: World) -> None:
    engine = world.engine
    assert engine is not None
    world.stack.cli("rollback", "support")
    wait_until(lambda: world.client.get("support").recipe["content"] == FIRST, 180, "the rollback to be complete")
    assert restored(engine, FIRST) > 100
    # The file says otherwise, and says so.
    assert "1 replaced" in world.apply("--dry-run")


def test_labels_and_owners_select(world: World) -> None:
    assert world.stack.json("list", "-l", "team=support,!canary", "--owner", "support")
    assert world.stack.json("list", "-l", "team!=support") == []
    exported = world.stack.cli("export-config").stdout
    world.file.write_text(exported)
    assert "2 unchanged" in world.apply("--dry-run")
    world.stack.cli("unpin", "-l", "team=support")
    assert [prompt.pinned for prompt in world.client.list() if "@" not in prompt.name] == [False, False]
    world.stack.cli("evict", "-l", "team=support")
    assert {prompt.name for prompt in world.client.list()} <= {"support@1", "support@2", "support@3"}
