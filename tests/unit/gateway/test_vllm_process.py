"""Inside vLLM: the engine's outputs say what was cached, for marked requests only."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from kvtier.gateway import PromptCaching
from kvtier.gateway.vllm_process import count_cached_tokens, render_app
from tests.unit.gateway.test_prompt_caching import KEY, NUM_SYSTEM, messages_request
from tests.unit.gateway.vllm_app import Client, VllmApp


class Engine:
    """An engine client as vLLM's API server has it."""

    def __init__(self, cached_tokens: int) -> None:
        self.cached_tokens, self.num_closed = cached_tokens, 0

    async def generate(self, text: str) -> AsyncIterator[Any]:
        """Yield two outputs."""
        try:
            for word in (text, text):
                yield SimpleNamespace(num_cached_tokens=self.cached_tokens, word=word)
        finally:
            self.num_closed += 1


class EngineApp(VllmApp):
    """A vLLM whose answers come from an engine; without the flag for cached tokens."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(has_details=False)
        self.state = SimpleNamespace(engine_client=engine)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not scope["path"].endswith("/render"):
            outputs: Any = self.state.engine_client.generate("a")
            # As vLLM does: in a task of its own.
            await asyncio.create_task(anext(outputs))
            await outputs.aclose()
        await super().__call__(scope, receive, send)


def ask(app: EngineApp, **fields: Any) -> Any:
    """Send a request through the app inside vLLM."""

    async def with_app(scope: Any, receive: Any, send: Any) -> None:
        await PromptCaching(app)({**scope, "app": app}, receive, send)

    return asyncio.run(Client(with_app, **KEY).post("/v1/messages", messages_request(**fields)))


def test_counts_are_true_without_the_flag() -> None:
    usage = ask(EngineApp(Engine(cached_tokens=4))).json()["usage"]
    assert usage["cache_read_input_tokens"] == 4
    assert usage["cache_creation_input_tokens"] == NUM_SYSTEM - 4


def test_counts_are_in_the_first_event_of_a_stream() -> None:
    first = ask(EngineApp(Engine(cached_tokens=4)), stream=True).events()[0]
    assert first["message"]["usage"]["cache_read_input_tokens"] == 4
    assert first["message"]["usage"]["cache_creation"]["ephemeral_5m_input_tokens"] == NUM_SYSTEM - 4


def test_the_engine_is_prepared_once_and_its_outputs_are_closed() -> None:
    app = EngineApp(Engine(cached_tokens=0))
    ask(app)
    prepared = app.state.engine_client.generate
    ask(app)
    assert app.state.engine_client.generate is prepared
    assert app.state.engine_client.num_closed == 2


def test_requests_without_markers_get_the_engines_own_outputs() -> None:
    engine = Engine(cached_tokens=0)
    assert count_cached_tokens({"app": SimpleNamespace(state=SimpleNamespace(engine_client=engine))})
    assert type(engine.generate("a")).__qualname__ == "async_generator"
    assert engine.generate("a").ag_code is Engine.generate.__code__  # type: ignore[attr-defined]


def test_what_is_no_vllm_has_neither() -> None:
    for scope in ({}, {"app": None}, {"app": SimpleNamespace(state=SimpleNamespace())}):
        assert not count_cached_tokens(scope)
        assert render_app(scope) is None
