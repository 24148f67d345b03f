"""Proof that a restored prompt is right: a live vLLM answers with KV from kvtier, and with KV of its own."""

from kvtier.verification.comparison import Comparison, ComparisonVerdict, compare_live
from kvtier.verification.completions import Completer, Completion, completion_body, read_completion

__all__ = [
    "Comparison",
    "ComparisonVerdict",
    "Completer",
    "Completion",
    "compare_live",
    "completion_body",
    "read_completion",
]
