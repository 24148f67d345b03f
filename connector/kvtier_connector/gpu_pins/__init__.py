"""Keeps pinned prompts in vLLM's own blocks, as long as no request needs the memory (ADR 16)."""

from kvtier_connector.gpu_pins.block_ranking import PinnedBlocks
from kvtier_connector.gpu_pins.hooks import GpuPins

__all__ = ["GpuPins", "PinnedBlocks"]
