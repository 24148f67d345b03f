"""Pinned prompts in vLLM's own blocks: kept there as long as nobody needs the room (ADR 16)."""

from kvtier_connector.gpu_pins.guard import GpuPins
from kvtier_connector.gpu_pins.pinned import PinnedBlocks

__all__ = ["GpuPins", "PinnedBlocks"]
