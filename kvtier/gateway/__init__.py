"""Cache markers of clients: an ASGI app in vLLM (`--middleware kvtier.gateway.PromptCaching`) or in front of it.

It knows neither the daemon nor the connector: its instruction travels in the request's `kv_transfer_params`.
"""

from kvtier.gateway.prompt_caching import PromptCaching

__all__ = ["PromptCaching"]
