"""Pinned prompts in vLLM's own blocks: kept there as long as nobody needs the room (ADR 16)."""

from kvtier_connector.gpu_pins.block_ranking import PinnedBlocks
from kvtier_connector.gpu_pins.hooks import GpuPins

__all__ = ["GpuPins", "PinnedBlocks"]
