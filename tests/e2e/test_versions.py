"""A pinned prompt is replaced while requests flow: none of them computes a prompt that has a pin.

And the Python library with the same engine.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from kvtier import AsyncClient, Client, PromptState
from kvtier.errors import PromptNotFoundError
from kvtier.library import progress_events as events
from tests.e2e.harness import EVICTING, Answer, Stack, ask, forget_gpu, running_stack, tokens

PREFIX_TOKENS = 640
FIRST, SECOND = tokens(1, PREFIX_TOKENS), tokens(2, PREFIX_TOKENS)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Stack, Engine]]:
    options = EngineOptions(model=str(cached_model("tiny", TINY)), max_batched_tokens=256, connector_config=EVICTING)
    with running_stack(options) as stack, stack.engine() as engine:
        stack.pin("support", FIRST, engine)
        yield stack, engine


@contextmanager
def traffic(engine: Engine, prefix: list[int]) -> Iterator[list[Answer]]:
    """Ask with a prefix, mostly out of kvtier, until the block ends."""
    answers: list[Answer] = []
    ends = threading.Event()

    def send() -> None:
        for number in range(200):
            if ends.is_set():
                return
            engine.http.post("/reset_prefix_cache")  # does nothing while another request runs
            answers.append(ask(engine, prefix + tokens(1000 + number, 40), max_tokens=1, alone=False))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield answers
    finally:
        ends.set()
        thread.join()


def test_requests_with_the_old_prompt_are_restored_until_the_new_one_is_durable(served: tuple[Stack, Engine]) -> None:
    stack, engine = served
    with traffic(engine, FIRST) as answers:
        said = stack.pin("support", SECOND, engine, "--replace").stdout
    assert "the pin that stands serves until support@2 is durable" in said
    assert "replaced: support; the version before is support@1" in said
    assert len(answers) > 1
    assert {answer.cached_tokens for answer in answers} == {PREFIX_TOKENS}
    forget_gpu(engine)
    assert ask(engine, SECOND + tokens(3, 40)).restored_tokens == PREFIX_TOKENS
    versions = {each["name"]: each["pinned"] for each in stack.json("history", "support")}
    assert versions == {"support@1": False, "support": True}


def test_a_rollback_needs_no_prefill(served: tuple[Stack, Engine]) -> None:
    stack, engine = served
    stack.cli("rollback", "support")
    assert stack.json("show", "support")["state"] == "DURABLE"
    assert [each["name"] for each in stack.json("history", "support")] == ["support@1", "support@2", "support"]
    forget_gpu(engine)
    assert ask(engine, FIRST + tokens(4, 40)).restored_tokens == PREFIX_TOKENS


def test_one_that_vllm_cannot_use_changes_nothing(served: tuple[Stack, Engine]) -> None:
    stack, engine = served
    short = stack.home / "short.json"
    short.write_text("[1, 2, 3]")
    arguments = ("pin", "support", "--tokens", str(short), "--url", engine.url, "--replace")
    assert "The pin 'support' that stands was not changed" in stack.cli(*arguments, expect=1).stderr
    forget_gpu(engine)
    assert ask(engine, FIRST + tokens(5, 40)).restored_tokens == PREFIX_TOKENS


def test_the_library_pins_warms_and_forgets(served: tuple[Stack, Engine]) -> None:
    stack, engine = served
    prefix = tokens(6, PREFIX_TOKENS)
    seen: list[events.Progress] = []
    with Client(stack.daemon.socket, url=engine.url) as client:
        pinned = client.pin("library", tokens=[*prefix, *tokens(7, 8)], priority=7, on_progress=seen.append)
        assert (pinned.name, pinned.state, pinned.priority) == ("library", PromptState.DURABLE, 7)
        assert [type(event) for event in seen if not isinstance(event, events.Capturing)] == [
            events.Registered,
            events.Confirmed,
            events.Captured,
        ]
        assert {prompt.name for prompt in client.list()} >= {"library", "support"}
        with client.watch("library", timeout_s=60) as watch:
            assert next(watch).pin_id == pinned.pin_id
        forget_gpu(engine)
        assert ask(engine, prefix + tokens(8, 40)).restored_tokens == PREFIX_TOKENS
        forget_gpu(engine)
        (warmed,) = client.warm("library")
        assert (warmed.result, warmed.num_tokens) == (events.WarmResult.WARMED, PREFIX_TOKENS + 8)
        assert client.unpin("library").pinned is False
        assert client.evict("library").num_chunks > 0
        with pytest.raises(PromptNotFoundError):
            client.get("library")

    async def names() -> set[str]:
        async with AsyncClient(stack.daemon.socket) as client:
            return {prompt.name for prompt in await client.list()}

    assert "library" not in asyncio.run(names())
