"""In which order vLLM admits waiting requests when its pool is short of blocks (ADR 26)."""

from kvtier_connector.admission.admission_hooks import Admission, PoolShape

__all__ = ["Admission", "PoolShape"]
