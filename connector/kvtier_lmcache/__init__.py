"""LMCache's L2 tier on kvtier's daemon: a plugin adapter for LMCache's multi-process server (docs/lmcache.md)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier_lmcache.adapter import KVTierL2Adapter

__all__ = ["KVTierL2Adapter"]


def __getattr__(name: str) -> Any:
    """Import the adapter when LMCache asks for it: the modules beside it work without LMCache."""
    if name in __all__:
        from kvtier_lmcache.adapter import KVTierL2Adapter

        return KVTierL2Adapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
