"""The systems by the names that command lines take."""

from benchmarks.systems.kvtier_system import KVTier
from benchmarks.systems.lmcache_system import LMCache
from benchmarks.systems.system import System
from benchmarks.systems.vllm_systems import VLLMTiering

SYSTEMS: dict[str, type[System]] = {
    "kvtier": KVTier,
    "lmcache": LMCache,
    "vllm-fs": VLLMTiering,
}
