"""kvtier: explicit prompt caching for self-hosted vLLM."""

from kvtier.version import __version__

__all__ = ["__version__"]
