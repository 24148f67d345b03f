"""What the app gets from vLLM when it runs inside vLLM's API server, and a gateway in front does not.

Source: vLLM 0.32, `entrypoints/launchers/api_server/app_state.py`, `entrypoints/scale_out/render/api_router.py`,
`v1/engine/async_llm.py`. What a version lacks is not used: then the app asks as a gateway does.
"""

import importlib
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from kvtier.gateway.asgi import App, Scope
from kvtier.gateway.usage_numbers import UsageWriter

MEASURED: ContextVar[UsageWriter | None] = ContextVar("kvtier_measured", default=None)
"""What the engine's outputs of this request are counted for; None for requests without markers."""


def is_inside_vllm(scope: Scope) -> bool:
    """Return whether the app runs in vLLM's API server."""
    return getattr(getattr(scope.get("app"), "state", None), "engine_client", None) is not None


def render_app(scope: Scope) -> App | None:
    """Return vLLM's own render routes as an app of their own, which no one can reach from outside.

    Without `--enable-scale-out` vLLM answers 403 at these paths. None: this is no vLLM, or a version without them.
    """
    state = getattr(scope.get("app"), "state", None)
    if getattr(state, "serving_render", None) is None:
        return None
    try:
        fastapi = importlib.import_module("fastapi")
        routes = importlib.import_module("vllm.entrypoints.scale_out.render.api_router")
    except ImportError:
        return None
    app: Any = fastapi.FastAPI(openapi_url=None)
    app.include_router(routes.router)
    app.state = state
    return app  # type: ignore[no-any-return]


def count_cached_tokens(scope: Scope) -> bool:
    """Have the engine's outputs counted for `MEASURED`; return whether this vLLM makes it possible.

    An output says how many tokens of the prompt were not computed, with or without `--enable-prompt-tokens-details`,
    and before the first event of a stream is written.
    """
    engine: Any = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
    generate = getattr(engine, "generate", None)
    if generate is None:
        return False
    if not hasattr(generate, "kvtier_counts"):
        engine.generate = _counting(generate)
    return True


def _counting(generate: Callable[..., Any]) -> Callable[..., Any]:
    def generate_counted(*args: Any, **kwargs: Any) -> Any:
        outputs, usage = generate(*args, **kwargs), MEASURED.get()
        return outputs if usage is None else _counted(outputs, usage)

    generate_counted.kvtier_counts = True  # type: ignore[attr-defined]
    return generate_counted


async def _counted(outputs: Any, usage: UsageWriter) -> AsyncIterator[Any]:
    async with aclosing(outputs):
        async for output in outputs:
            if usage.measured_tokens is None and isinstance(getattr(output, "num_cached_tokens", None), int):
                usage.measured_tokens = output.num_cached_tokens
            usage.read_report(getattr(output, "kv_transfer_params", None))
            yield output
