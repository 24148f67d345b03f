"""The app as vLLM loads it here: a header of each request switches it off."""

from kvtier.gateway import PromptCaching
from kvtier.gateway.asgi import App, Receive, Scope, Send, header

BYPASS = "x-bypass"


class Switchable:
    """vLLM's app with ours around it, except for requests that say `x-bypass`."""

    def __init__(self, app: App) -> None:
        self._app, self._caching = app, PromptCaching(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        is_bypassed = scope["type"] == "http" and header(scope["headers"], BYPASS.encode())
        await (self._app if is_bypassed else self._caching)(scope, receive, send)
